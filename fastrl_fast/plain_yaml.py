"""Settings as YAML text that the command line reads back as the same values."""

import re
from typing import Any

import yaml


class _Dumper(yaml.SafeDumper):
    """Quotes text such as "1e-6": PyYAML takes it for text, the command line's reader for a number."""


_NUMBER = re.compile(r"[-+]?(?:\d[\d_]*\.?[\d_]*|\.[\d_]+)(?:[eE][-+]?\d+)?$")
_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))


def dump(settings: dict[str, Any]) -> str:
    return yaml.dump(settings, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
