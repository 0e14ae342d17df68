"""The plan of batches: the same step for every way of spreading it, nothing lost or doubled, pads never count."""

import numpy as np
import pytest
import torch
from data_helpers import chat, make_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks.llamas import llama_config
from transformers import LlamaForCausalLM

from heavylift.data.batches import IGNORE, Batch, BatchPlan, evaluation_plan
from heavylift.data.chat import render
from heavylift.data.report import DataReport
from heavylift.data.samples import SampleSet
from heavylift.errors import UserError


def numbered(num: int, vocab_size: int = 10**6) -> SampleSet:
    """Sample i begins with token i + 1 and has a length of its own; some of its tokens are trained."""
    rng = np.random.default_rng(0)
    lists = []
    for i in range(num):
        length = int(rng.integers(2, 30))
        trained = [False, *(rng.random(length - 2) < 0.6).tolist(), True]
        lists.append(([i + 1, *rng.integers(1, vocab_size, length - 1).tolist()], trained))
    return SampleSet.from_lists(lists, DataReport(("numbered",), num, num))


def rows_of(batches: list[Batch]) -> list[tuple]:
    """Every non-empty row as (real input ids, labels there), the padding stripped."""
    rows = []
    for batch in batches:
        for ids, labels in zip(batch.input_ids.tolist(), batch.labels.tolist(), strict=True):
            length = len(ids)
            while length and ids[length - 1] == 0:
                length -= 1
            assert set(labels[length:]) <= {IGNORE}, "a pad is trained"
            if length:
                rows.append((tuple(ids[:length]), tuple(labels[:length])))
    return rows


def step_rows(plan: BatchPlan, step: int) -> list[tuple]:
    return [r for rank in range(plan.world_size) for r in rows_of(plan.micro_batches(step, rank))]


def first_tokens(rows: list[tuple]) -> list[int]:
    return [ids[0] for ids, _ in rows]


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 60), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.integers(-3, 2**40), st.data())
def test_every_epoch_covers_the_data_once(num, micro, accumulation, world, seed, data):
    samples = numbered(max(num, world))
    plan = BatchPlan(samples, micro, accumulation, world, seed)
    epoch = data.draw(st.integers(0, 3))
    seen = []
    for step in range(epoch * plan.steps_per_epoch, (epoch + 1) * plan.steps_per_epoch):
        batches = [plan.micro_batches(step, rank) for rank in range(world)]
        assert {len(b) for b in batches} == {accumulation}
        flat = [b for rank in batches for b in rank]
        assert all(b.input_ids.shape == b.labels.shape and b.input_ids.shape[0] == micro for b in flat)
        assert sum(b.num_tokens for b in flat) == plan.num_tokens(step)
        assert sum(b.num_trained_tokens for b in flat) == plan.num_trained_tokens(step) > 0
        seen += first_tokens(rows_of(flat))
    assert sorted(seen) == [i + 1 for i in range(len(samples))]


def test_rows_hold_the_sample_and_shifted_labels():
    samples = numbered(40)
    plan = BatchPlan(samples, 3, 2, 2, seed=1)
    for step in range(plan.steps_per_epoch):
        for ids, labels in step_rows(plan, step):
            tokens, trained = samples.sample(ids[0] - 1)
            assert list(ids) == tokens.tolist()
            expected = [int(tokens[t + 1]) if trained[t + 1] else IGNORE for t in range(len(tokens) - 1)] + [IGNORE]
            assert list(labels) == expected


def test_labels_decode_to_the_answer():
    tokenizer = make_tokenizer()
    lists = [render(tokenizer, chat("Weather?", answer), False) for answer in ("Fog.", "A slow swell, 🙂", "x")]
    (batch,) = evaluation_plan(SampleSet.from_lists(lists, DataReport((), 3, 3)), 3, 1).micro_batches(0, 0)
    decoded = [tokenizer.decode(labels[labels != IGNORE]) for labels in batch.labels]
    assert decoded == ["Fog.<|im_end|>", "A slow swell, 🙂<|im_end|>", "x<|im_end|>"]


@pytest.mark.parametrize(("micro", "accumulation", "world"), [(1, 8, 1), (1, 1, 8), (2, 2, 2), (4, 1, 2), (8, 1, 1)])
def test_a_step_does_not_depend_on_how_it_is_spread(micro, accumulation, world):
    samples = numbered(45)
    reference = BatchPlan(samples, 2, 1, 4, seed=7)
    plan = BatchPlan(samples, micro, accumulation, world, seed=7)
    assert plan.steps_per_epoch == reference.steps_per_epoch == 6
    for step in range(14):  # over two epochs, each with a small last step
        assert sorted(step_rows(plan, step)) == sorted(step_rows(reference, step))
        assert plan.num_tokens(step) == reference.num_tokens(step)
        assert plan.num_trained_tokens(step) == reference.num_trained_tokens(step)


def test_resume_gives_the_same_stream():
    samples = numbered(23)
    running = BatchPlan(samples, 2, 2, 2, seed=9)
    stream = [running.micro_batches(step, 1) for step in range(9)]
    for start in (0, 2, 4, 7):  # a new plan each time, as in a new process
        resumed = BatchPlan(samples, 2, 2, 2, seed=9)
        for step in range(start, 9):
            for a, b in zip(resumed.micro_batches(step, 1), stream[step], strict=True):
                assert torch.equal(a.input_ids, b.input_ids) and torch.equal(a.labels, b.labels)


def test_order_changes_with_epoch_and_seed():
    plan, other = (BatchPlan(numbered(50), 1, 10, 1, seed) for seed in (1, 2))
    epochs = [[i for s in range(5) for i in plan.sample_ids(e * 5 + s).tolist()] for e in range(3)]
    assert len({tuple(e) for e in epochs}) == 3 and list(range(50)) not in epochs
    assert plan.sample_ids(0).tolist() != other.sample_ids(0).tolist()


def test_small_last_step_keeps_every_process_in_step():
    plan = BatchPlan(numbered(9), 1, 2, 4, seed=1)
    assert plan.steps_per_epoch == 2
    last = [plan.micro_batches(1, rank) for rank in range(4)]
    assert [len(batches) for batches in last] == [2, 2, 2, 2]
    assert len(rows_of([b for batches in last for b in batches])) == 1
    empty = last[3][1]
    assert empty.num_tokens == empty.num_trained_tokens == 0 and empty.input_ids.shape == (1, 8)
    assert (empty.labels == IGNORE).all()


def test_padding_to_a_multiple():
    samples = numbered(30)
    for multiple in (1, 8, 64):
        plan = BatchPlan(samples, 2, 1, 1, seed=1, pad_to_multiple_of=multiple)
        widths = {b.input_ids.shape[1] for step in range(15) for b in plan.micro_batches(step, 0)}
        assert all(width % multiple == 0 for width in widths) and max(widths) == plan.longest
    assert BatchPlan(samples, 2, 1, 1, seed=1, pad_to_multiple_of=1).longest == samples.lengths.max()


def test_number_of_steps():
    plan = BatchPlan(numbered(30), 1, 1, 1, seed=1)
    assert [plan.num_steps(e) for e in (1.0, 2.5, 0.1, 0.101, 0.001)] == [30, 75, 3, 4, 1]
    assert plan.num_steps(1.0, max_steps=7) == 7


def test_more_processes_than_data():
    with pytest.raises(UserError, match=r"more processes than data: 4 processes share 3 samples; lower launch.nproc"):
        BatchPlan(numbered(3), 1, 1, 4, seed=1)
    with pytest.raises(UserError, match="2 processes share 1 sample;"):
        BatchPlan(numbered(1), 1, 1, 2, seed=1)
    BatchPlan(numbered(4), 8, 8, 4, seed=1)


def test_evaluation_is_one_pass_in_file_order_whatever_the_processes():
    samples = numbered(7)
    alone = evaluation_plan(samples, 2, 1)
    assert first_tokens([r for s in range(alone.steps_per_epoch) for r in step_rows(alone, s)]) == [1, 2, 3, 4, 5, 6, 7]
    for world in (2, 3, 16):
        plan = evaluation_plan(samples, 2, world)
        rows = [r for s in range(plan.steps_per_epoch) for r in step_rows(plan, s)]
        assert sorted(first_tokens(rows)) == [1, 2, 3, 4, 5, 6, 7]
        assert all(len(plan.micro_batches(0, rank)) == 1 for rank in range(world))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_loss_and_gradient_do_not_see_the_padding(attention):
    """The claim of `Batch`: right padding needs no mask. Summed loss of padded batches == sum of single samples."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama_config(64, 16, 32, 2, 2, 1, attn_implementation=attention)).double()
    samples = numbered(6, vocab_size=64)

    def summed_loss(batches: list[Batch]) -> tuple[float, torch.Tensor]:
        model.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            logits = model(input_ids=batch.input_ids).logits
            loss = loss + torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), batch.labels.flatten(), ignore_index=IGNORE, reduction="sum"
            )
        loss.backward()
        return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])

    single = BatchPlan(samples, 1, 6, 1, seed=3, pad_to_multiple_of=1)
    padded = BatchPlan(samples, 4, 2, 1, seed=3, pad_to_multiple_of=64)
    loss, grad = summed_loss(single.micro_batches(0, 0))
    loss_padded, grad_padded = summed_loss(padded.micro_batches(0, 0))
    assert loss == pytest.approx(loss_padded, rel=1e-6)
    torch.testing.assert_close(grad, grad_padded, rtol=1e-4, atol=1e-6)  # eager attention takes its softmax in float32
