"""fastrl_fast inside other people's trainers."""
