import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastrl_fast.ops import RULES, reference, select_diverse


def flat(groups, classes):
    """Token lists per group, and the class labels of all rollouts, as tensors."""
    rollouts = [tokens for group in groups for tokens in group]
    return (
        torch.tensor([t for tokens in rollouts for t in tokens], dtype=torch.int64),
        torch.tensor([0, *map(len, rollouts)]).cumsum(0),
        torch.tensor([0, *map(len, groups)]).cumsum(0),
        torch.tensor(classes, dtype=torch.int64),
    )


def select(group, classes=None, **options):
    """One group; returns the kept indices and the representatives."""
    kept, representative = select_diverse(*flat([group], classes or [0] * len(group)), **options)
    return kept.nonzero()[:, 0].tolist(), representative.tolist()


def test_every_kept_member_counts_in_the_paper_and_only_the_first_in_the_code():
    # J(0,1) = 0, J(0,2) = 0, J(1,2) = 1/2: the third repeats the second, not the first
    group = [[1, 2, 3], [7, 8, 9], [7, 8, 5]]
    assert select(group, rule="mdap", tau=0.8) == ([0, 1], [0, 1, 1])
    assert select(group, rule="mdap_seed", tau=0.8) == ([0, 1, 2], [0, 1, 2])


def test_a_tie_is_decided_exactly():
    # J = 1/5, so the distance is exactly tau = 0.8: the paper's strict < keeps, the code's >= prunes
    group = [[1, 2, 3], [3, 4, 5]]
    assert select(group, rule="mdap", tau=0.8)[0] == [0, 1]
    assert select(group, rule="mdap_seed", tau=0.8)[0] == [0]
    for shared in range(1, 300):  # J = 2 shared / (10 shared), a fraction that floats do not hold
        first, second = range(6 * shared), [*range(2 * shared), *range(6 * shared, 10 * shared)]
        assert select([list(first), list(second)], rule="mdap", tau=0.8)[0] == [0, 1]
        assert select([list(first), list(second)], rule="mdap_seed", tau=0.8)[0] == [0]


def test_two_empty_answers_are_the_same_answer():
    for rule in RULES:
        assert select([[], [], [1]], rule=rule) == ([0, 2], [0, 0, 2])


def test_classes_are_apart_and_negative_ones_are_out():
    same = [[1, 2]] * 5
    assert select(same, [0, 1, 0, -1, 1]) == ([0, 1], [0, 1, 0, -1, 1])
    kept, representative = select_diverse(*flat([same[:2], same[:2]], [0, 0, 0, 0]))  # the label of another group
    assert kept.tolist() == [True, False, True, False] and representative.tolist() == [0, 0, 2, 2]


def test_the_representative_is_the_nearest_kept_member_even_a_later_one():
    group = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8, 9], [1, 10, 11, 12, 13, 14], [1, 2, 3, 7, 8, 10]]
    # tau 0.5: J(0,1) = 1/3 kept; J(2,.) small, kept; J(3,1) = 5/7 pruned
    assert select(group, tau=0.5) == ([0, 1, 2], [0, 1, 2, 1])
    # under the seed rule a member may be pruned for the seed and yet be nearer to one kept after it
    group = [[1, 2, 3, 4], [1, 2, 5, 6], [5, 6, 7, 8, 9, 1]]
    assert select(group, rule="mdap_seed", tau=0.8) == ([0, 2], [0, 2, 2])


def test_order_of_tokens_matters_from_pairs_on():
    group = [[1, 2, 3, 4], [4, 3, 2, 1], [1, 2, 3, 4]]
    assert select(group, ngram=1)[0] == [0]
    assert select(group, ngram=2) == ([0, 1], [0, 1, 0])


def test_limits_of_tau():
    group = [[1, 2], [1, 2], [2, 3], [4]]
    assert select(group, tau=0.0)[0] == [0, 1, 2, 3]  # no distance is below 0
    assert select(group, tau=0.0, rule="mdap_seed")[0] == [0, 2, 3]  # only copies
    assert select(group, tau=1.0)[0] == [0, 3]  # only what shares nothing


rollout = st.lists(st.integers(0, 5) | st.sampled_from([2**40, -3]), max_size=8)
members = st.lists(st.tuples(rollout, st.integers(-1, 2)), max_size=7)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(members, max_size=4),
    st.sampled_from(RULES),
    st.sampled_from([0.0, 0.2, 1 / 3, 0.5, 0.75, 0.8, 1.0]) | st.floats(0, 1),
    st.integers(1, 4),
)
def test_against_python_sets(groups, rule, tau, ngram):
    arguments = flat([[t for t, _ in g] for g in groups], [c for g in groups for _, c in g])
    kept, representative = select_diverse(*arguments, rule=rule, tau=tau, ngram=ngram)
    expected, nearest = reference.select_diverse(*arguments, rule=rule, tau=tau, ngram=ngram)
    assert kept.tolist() == expected.tolist() and representative.tolist() == nearest.tolist()
    assert bool(kept[representative[representative >= 0]].all()), "a representative is a kept rollout"


def test_thread_count_changes_nothing():
    make = torch.Generator().manual_seed(0)
    lengths = torch.randint(0, 200, (1600,), generator=make)
    tokens = torch.randint(0, 300, (int(lengths.sum()),), generator=make)
    cu_seqlens = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    arguments = (tokens, cu_seqlens, torch.arange(0, 1601, 16), torch.randint(-1, 2, (1600,), generator=make))
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2):
            torch.set_num_threads(threads)
            results.append(select_diverse(*arguments, tau=0.7))
    finally:
        torch.set_num_threads(before)
    assert tokens.numel() > 100_000, "below this the kernel is serial"
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    assert 0 < int(results[0][0].sum()) < 1600


def test_opcheck():
    arguments = flat([[[1, 2], [1, 3], []], []], [0, 0, -1])
    torch.library.opcheck(torch.ops.fastrl_fast.select_diverse.default, (*arguments, True, 800_000, 2))


def test_compiles_without_graph_breaks():
    arguments = flat([[[1, 2], [1, 3], [1, 2]], []], [0, 0, 0])

    def weights(classes):
        kept, representative = select_diverse(*arguments[:3], classes + 0)
        return kept * representative.bincount(minlength=3)

    compiled = torch.compile(weights, fullgraph=True, backend="aot_eager")
    assert compiled(arguments[3]).tolist() == weights(arguments[3]).tolist() == [3, 0, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rule": "dpp"}, "rule must be one of mdap, mdap_seed, not 'dpp'"),
        ({"tau": 1.5}, "tau must lie in [0, 1], not 1.5"),
        ({"tau": float("nan")}, "tau must lie in [0, 1], not nan"),
        ({"ngram": 0}, "ngram must be >= 1, not 0"),
        ({"token_ids": torch.zeros(3, dtype=torch.int32)}, "token_ids must be one-dimensional int64 on the device"),
        ({"classes": torch.zeros(3, dtype=torch.int64)}, "classes must be one per rollout (2), not 3"),
        ({"cu_seqlens": torch.tensor([0, 2, 4])}, "cu_seqlens must end with 3, not 4"),
        ({"cu_group_sizes": torch.tensor([0, 1])}, "cu_group_sizes must end with 2, not 1"),
        ({"cu_group_sizes": torch.zeros(0, dtype=torch.int64)}, "cu_group_sizes must hold at least the 0"),
    ],
)
def test_what_is_refused(change, message):
    names = ("token_ids", "cu_seqlens", "cu_group_sizes", "classes")
    arguments = {**dict(zip(names, flat([[[1], [2, 3]]], [0, 0]), strict=True)), **change}
    with pytest.raises(ValueError) as caught:
        select_diverse(*[arguments.pop(name) for name in names], **arguments)
    assert message in str(caught.value)
