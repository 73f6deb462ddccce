"""Choices, capacity, measures and biases against plain NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from trellis.errors import UserError
from trellis.models import MixtralConfig, Routing
from trellis.named import named
from trellis.nn.moe import Choices, ExpertsError, Routed, choose, limit, measure, shift

BATCH, POS, EXPERTS, CHOICES = 3, 7, 5, 2
SCORES = named(2 * jax.random.normal(jax.random.key(0), (BATCH, POS, EXPERTS)), "batch pos routes")
COUNTED = named((jax.random.uniform(jax.random.key(1), (BATCH, POS)) < 0.7).astype(jnp.float32), "batch pos")


def chances():
    e = np.exp(np.asarray(SCORES.array, np.float64))
    return e / e.sum(-1, keepdims=True)


def test_the_likeliest_are_chosen():
    ids, weights = choose(SCORES, CHOICES)
    wanted = np.argsort(-chances(), -1)[..., :CHOICES]
    np.testing.assert_array_equal(ids.array, wanted)
    taken = np.take_along_axis(chances(), wanted, -1)
    np.testing.assert_allclose(weights.array, taken / taken.sum(-1, keepdims=True), rtol=1e-5)


@pytest.mark.slow
def test_a_bias_picks_and_does_not_weigh():
    bias = named(jnp.array([0.0, 0.0, 10.0, 0.0, 0.0]), "routes")
    ids, weights = choose(SCORES, CHOICES, bias=bias)
    assert (ids.array[..., 0] == 2).all()
    taken = np.take_along_axis(chances(), np.asarray(ids.array), -1)
    np.testing.assert_allclose(weights.array, taken / taken.sum(-1, keepdims=True), rtol=1e-5)

    def loss(scores, bias):
        return (choose(scores, CHOICES, bias=bias).weights ** 2).sum().array

    to_scores, to_bias = jax.grad(loss, (0, 1))(SCORES, bias)
    assert not to_bias.array.any() and to_scores.array.any()


def test_experts_of_no_chance_that_a_bias_picks_have_no_weight():
    """A softmax in float32 is 0 where a score is 104 below the largest."""
    scores = named(jnp.array([[[200.0, 0.0, 0.0, 0.0, 0.0]]]), "batch pos routes")
    ids, weights = choose(scores, CHOICES, bias=named(jnp.arange(5.0), "routes"))
    assert ids.array.tolist() == [[[4, 3]]] and not weights.array.any()


@pytest.mark.parametrize("how, low", [("softmax", -200.0), ("softmax", -46.0), ("sigmoid", -200.0), ("sigmoid", -46.0)])
def test_experts_of_hardly_a_chance_have_finite_gradients(how, low):
    scores = named(jnp.array([[[0.0 if how == "softmax" else low, low + 1, low]]]), "batch pos routes")
    bias, routing = named(jnp.array([0.0, 9.0, 9.0]), "routes"), Routing(scores=how, bias_rate=0.1)

    def first(scores):
        choices = choose(scores, CHOICES, routing, bias=bias)
        measured = measure(scores, choices, named(jnp.ones((1, 1)), "batch pos"), routing)
        return choices.weights.array[0, 0, 0] + 0 * measured.balance

    slope = jax.grad(first)(scores).array[0, 0]
    one, other = np.exp(low + 1), np.exp(low)  # the softmax's others and the sigmoid's change by no more than these
    total = one + other + 1e-20
    np.testing.assert_allclose(slope[1:], [one / total - (one / total) ** 2, -one * other / total**2], atol=1e-4)


ROUTINGS = {
    "sigmoid": Routing(scores="sigmoid"),
    "as they are": Routing(normalize=False),
    "one": Routing(normalize=False, scores="sigmoid"),
    "groups": Routing(scores="sigmoid", groups=4, groups_per_token=2, scale=2.5),
    "groups of one": Routing(groups=8, groups_per_token=3),
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_every_kind_of_routing(name):
    """Token by token, in NumPy."""
    routing, experts, count = ROUTINGS[name], 8, 1 if name == "one" else 3
    scores = named(2 * jax.random.normal(jax.random.key(2), (BATCH, POS, experts)), "batch pos routes")
    bias = named(jnp.linspace(0.3, -0.3, experts), "routes")
    ids, weights = choose(scores, count, routing, bias=bias)
    for place in np.ndindex(BATCH, POS):
        own = np.asarray(scores.array[place], np.float64)
        chances = 1 / (1 + np.exp(-own)) if routing.scores == "sigmoid" else np.exp(own) / np.exp(own).sum()
        picked = (chances + np.asarray(bias.array)).reshape(routing.groups, -1)
        of_groups = np.sort(picked)[:, -2:].sum(1)
        picked[np.argsort(-of_groups)[routing.groups_per_token :]] = -np.inf
        best = np.argsort(-picked.ravel())[:count]
        wanted = chances[best] / (chances[best].sum() if routing.normalize else 1) * routing.scale
        np.testing.assert_array_equal(ids.array[place], best)
        np.testing.assert_allclose(weights.array[place], wanted, rtol=1e-5)


@pytest.mark.slow
def test_sigmoids_are_balanced_by_their_shares():
    found = measure(SCORES, choose(SCORES, CHOICES, Routing(scores="sigmoid")), COUNTED, Routing(scores="sigmoid"))
    chance = 1 / (1 + np.exp(-np.asarray(SCORES.array)))
    counted = np.asarray(COUNTED.array)
    mean = (chance / chance.sum(-1, keepdims=True) * counted[..., None]).sum((0, 1))
    np.testing.assert_allclose(
        found.balance, EXPERTS * (found.load.array / found.load.array.sum() * mean).sum(), rtol=1e-5
    )


@pytest.mark.slow
def test_a_single_expert_learns_from_the_loss():
    gradient = jax.grad(lambda s: choose(s, 1, Routing(normalize=False)).weights.sum().array)(SCORES)
    assert gradient.array.any()


def test_biases_move_towards_an_even_load():
    bias, load = named(jnp.zeros((2, 3)), "layers routes"), named(jnp.array([[5.0, 1, 3], [2, 2, 2]]), "layers routes")
    np.testing.assert_allclose(shift(bias, load, 0.1).array, [[-0.1, 0.1, 0.0], [0.0, 0.0, 0.0]], atol=1e-7)


def test_capacity_keeps_the_first():
    """In each sequence, by position: a later token never pushes an earlier one out."""
    choices = choose(SCORES, CHOICES)
    capacity = 0.75
    room = -(-int(100 * capacity * CHOICES * POS) // (100 * EXPERTS))
    kept = limit(choices, EXPERTS, capacity)
    dropped = 0
    for b in range(BATCH):
        taken = dict.fromkeys(range(EXPERTS), 0)
        for p in range(POS):
            for k in range(CHOICES):
                expert = int(choices.ids.array[b, p, k])
                inside = taken[expert] < room
                taken[expert] += 1
                dropped += not inside
                assert kept.ids.array[b, p, k] == (expert if inside else EXPERTS)
                assert kept.weights.array[b, p, k] == (choices.weights.array[b, p, k] if inside else 0)
    assert 0 < dropped < BATCH * POS
    plenty = limit(choices, EXPERTS, EXPERTS / CHOICES)
    assert (plenty.ids.array == choices.ids.array).all()


@pytest.mark.parametrize("over", ["batch", "sequence"])
def test_measures(over):
    choices = choose(SCORES, CHOICES)
    found = measure(SCORES, choices, COUNTED, Routing(balance_over=over))
    counted, p = np.asarray(COUNTED.array), chances()
    hot = np.eye(EXPERTS)[np.asarray(choices.ids.array)].sum(2) * counted[..., None]
    np.testing.assert_allclose(found.load.array, hot.sum((0, 1)))
    np.testing.assert_allclose(found.z, (np.log(np.exp(SCORES.array).sum(-1)) ** 2 * counted).sum(), rtol=1e-5)
    if over == "batch":
        shares, mean = hot.sum((0, 1)) / hot.sum(), (p * counted[..., None]).sum((0, 1)) / counted.sum()
        wanted = EXPERTS * (shares * mean).sum() * counted.sum()
    else:
        shares = hot.sum(1) / hot.sum((1, 2))[:, None]
        mean = (p * counted[..., None]).sum(1) / counted.sum(1)[:, None]
        wanted = (EXPERTS * (shares * mean).sum(1) * counted.sum(1)).sum()
    np.testing.assert_allclose(found.balance, wanted, rtol=1e-5)


@pytest.mark.parametrize("over", ["batch", "sequence"])
def test_what_counts_is_the_same_along_names_that_it_lacks(over):
    choices, how = choose(SCORES, CHOICES), Routing(balance_over=over)
    for counted in (COUNTED["batch", 0], COUNTED["pos", 2], COUNTED["batch", 0]["pos", 0]):
        found = measure(SCORES, choices, counted, how)
        wanted = measure(SCORES, choices, counted.broadcast_to(COUNTED.axes), how)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.slow
def test_an_even_load_has_balance_one():
    scores = named(jnp.zeros((1, EXPERTS, EXPERTS)), "batch pos routes")
    ids = jnp.stack([jnp.arange(EXPERTS), (jnp.arange(EXPERTS) + 1) % EXPERTS], -1)[None]
    choices = Choices(named(ids, "batch pos choices"), named(jnp.full(ids.shape, 0.5), "batch pos choices"))
    counted = named(jnp.ones((1, EXPERTS)), "batch pos")
    np.testing.assert_allclose(measure(scores, choices, counted).balance / EXPERTS, 1.0, rtol=1e-6)


@pytest.mark.slow
def test_parts_of_a_batch_add_up():
    """With the whole batch's shares; with their own the load-balancing loss is another."""
    choices = choose(SCORES, CHOICES)
    whole = measure(SCORES, choices, COUNTED)
    shares = whole.load / whole.load.sum("routes")
    row = lambda x, b: x.with_array(x.array[b : b + 1])

    def parts(**how):
        each = [
            measure(row(SCORES, b), Choices(*(row(x, b) for x in choices)), row(COUNTED, b), **how)
            for b in range(BATCH)
        ]
        return jax.tree.map(lambda *x: sum(x), *each)

    for a, b in zip(jax.tree.leaves(parts(shares=shares)), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)
    assert abs(parts().balance - whole.balance) > 0.1


@pytest.mark.parametrize(
    ("count", "message"),
    [
        (
            6,
            "A token cannot go to more experts than it can reach.\n  seen:  6 of 5 experts\n  where: choose\n  fix:   "
            "use 5 at most",
        ),
        (
            1,
            "Normalized weights need two experts per token or more: a single weight is always 1, and the router "
            "learns nothing from the loss.\n  seen:  1 of 5 experts\n  where: choose\n  fix:   use 2 or more, or "
            "--model.routing.normalize false",
        ),
    ],
)
def test_refused_counts(count, message):
    with pytest.raises(ExpertsError) as error:
        choose(SCORES, count)
    assert str(error.value) == message


SIZES = dict(
    vocab=8, embed=8, layers=1, heads=2, kv_heads=2, head_dim=4, mlp=8, rope_theta=1e4, tie_embeddings=True,
    experts=4, experts_per_token=2,
)  # fmt: skip


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: MixtralConfig(**SIZES | {"experts_per_token": 5}),
            "A token cannot go to more experts than it can reach.\n  seen:  5 of 4 experts\n  where: "
            "model.experts_per_token\n  fix:   use 4 at most",
        ),
        (
            lambda: MixtralConfig(**SIZES | {"experts": 0}),
            "A model's sizes must be positive.\n  seen:  experts=0\n  where: model.experts\n  fix:   use 1 or more",
        ),
        (
            lambda: MixtralConfig(**SIZES | {"routing": Routing(groups=3)}),
            "All groups must have the same number of experts.\n  seen:  4 experts in 3 groups\n  where: "
            "model.experts_per_token\n  fix:   use a number of groups that divides the number of experts",
        ),
        (
            lambda: MixtralConfig(**SIZES | {"experts_per_token": 3, "routing": Routing(groups=2)}),
            "A token cannot go to more experts than it can reach.\n  seen:  3 of 2 experts, those of 1 of 2 groups\n  "
            "where: model.experts_per_token\n  fix:   use 2 at most",
        ),
        (
            lambda: Routing(groups=0),
            "`groups` must be 1 or more.\n  seen:  groups=0\n  where: model.routing.groups\n  fix:   use 1 for no "
            "groups",
        ),
        (
            lambda: Routing(groups=2, groups_per_token=3),
            "`groups_per_token` must be from 1 to the number of groups.\n  seen:  groups_per_token=3, groups=2\n  "
            "where: model.routing.groups_per_token\n  fix:   use 1 to 2",
        ),
        (
            lambda: Routing(scores="sigmoid", z_loss=0.1),
            "The z-loss needs softmax scores, since sigmoids have no denominator.\n  seen:  z_loss=0.1, "
            "scores=sigmoid\n  where: model.routing.z_loss\n  fix:   use 0",
        ),
        (
            lambda: Routing(scale=0.0),
            "`scale` must be more than 0.\n  seen:  scale=0.0\n  where: model.routing.scale\n  fix:   use 1, or the "
            "scale of the imported model",
        ),
        (
            lambda: Routing(balance=-1.0),
            "`balance` must be 0 or more.\n  seen:  balance=-1.0\n  where: model.routing.balance\n"
            "  fix:   use 0 to leave it out",
        ),
        (
            lambda: Routing(capacity=0.0),
            "`capacity` must be more than 0, and at most 1000.\n  seen:  capacity=0.0\n"
            "  where: model.routing.capacity\n  fix:   use 1.25 for a quarter more than an even load, or leave it out",
        ),
    ],
)
def test_refused_configurations(make, message):
    with pytest.raises(UserError) as error:
        make()
    assert str(error.value) == message


def test_a_balance_that_weighs_nothing_is_told_where_no_part_of_a_batch_changes_it():
    """Shares of the whole batch are counted ahead only for a loss; the mean over parts would be another number."""
    sums = measure(SCORES, choose(SCORES, CHOICES), COUNTED)
    told = {
        routing: set(Routed(sums.load, sums.balance, sums.z, routing).metrics(COUNTED.sum().array))
        for routing in (Routing(), Routing(balance=0.1), Routing(balance_over="sequence"))
    }
    always = {"router_z", "router_load_max", "router_load_min"}
    assert list(told.values()) == [always, always | {"router_balance"}, always | {"router_balance"}]


@pytest.mark.slow
def test_room_is_counted_without_a_float_s_rounding():
    """1.1 times 10 tokens are 11; of floats they are a bit more."""
    ids = named(jnp.zeros((1, 100, 1), jnp.int32), "batch pos choices")
    kept = limit(Choices(ids, ids.astype(jnp.float32) + 1.0), 10, 1.1)
    assert kept.weights.sum().array == 11
