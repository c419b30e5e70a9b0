"""Admission, reservations, slots and turns, without any model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from surespec.local.scheduler import DecodePass, PromptPass, Scheduler, Sequence
from surespec.local.types import SamplingParams


def make(scheduler: Scheduler, prompt_len: int, max_tokens: int, request_id: int = 0) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens)
    limit = scheduler.check(prompt_len, params)
    return Sequence.create(request_id, [7] * prompt_len, params, limit, frozenset(), lambda _: None)


def finish_prompt(sequence: Sequence) -> None:
    """As a prompt pass leaves it: all read, one token emitted."""
    sequence.computed = sequence.prompt_len
    sequence.append([1])


def test_the_reservation_is_prompt_and_answer_cut_at_the_context():
    scheduler = Scheduler(4, 100, 1000)
    assert make(scheduler, 10, 20).limit == 30
    assert make(scheduler, 10, 500).limit == 100


def test_nobody_is_overtaken_and_everybody_fits():
    scheduler = Scheduler(8, 100, 120)
    big, small = make(scheduler, 50, 50), make(scheduler, 5, 5)
    for s in (make(scheduler, 20, 30), big, small):
        scheduler.add(s)
    assert [s.limit for s in scheduler.admit()] == [50]  # big does not fit, and small waits behind it
    scheduler.remove(scheduler.running[0])
    assert scheduler.admit() == [big, small]
    assert scheduler.reserved == 110


def test_slots_stay_compact():
    scheduler = Scheduler(4, 100, 1000)
    sequences = [make(scheduler, 3, 3, i) for i in range(4)]
    for s in sequences:
        scheduler.add(s)
    scheduler.admit()
    scheduler.remove(sequences[1])
    assert [s.request_id for s in scheduler.running] == [0, 3, 2]
    assert [s.slot for s in scheduler.running] == [0, 1, 2]
    scheduler.remove(sequences[2])
    assert [s.request_id for s in scheduler.running] == [0, 3]
    assert sequences[1].slot == sequences[2].slot == -1


def test_prompts_are_read_in_chunks_and_turns():
    scheduler = Scheduler(4, 2000, 4000)
    first, second = make(scheduler, 700, 5), make(scheduler, 30, 5)
    scheduler.add(first)
    scheduler.add(second)
    scheduler.admit()
    one = scheduler.next_pass()
    assert isinstance(one, PromptPass)
    assert one.counts == (512,)
    first.computed = 512
    two = scheduler.next_pass()
    assert isinstance(two, PromptPass)
    assert two.counts == (188, 30)
    finish_prompt(first)
    assert isinstance(scheduler.next_pass(), DecodePass)  # someone decodes now: its turn
    assert isinstance(scheduler.next_pass(), PromptPass)
    finish_prompt(second)
    for _ in range(3):
        decode = scheduler.next_pass()
        assert isinstance(decode, DecodePass)
        assert decode.num_decoding == 2


def test_a_prompt_between_two_decoders_goes_along():
    """The last decoder moved behind a sequence that still reads its prompt."""
    scheduler = Scheduler(4, 2000, 8000)
    sequences = [make(scheduler, 10, 5, i) for i in range(2)] + [make(scheduler, 900, 5, 2)]
    for s in sequences:
        scheduler.add(s)
    scheduler.admit()
    finish_prompt(sequences[0])
    finish_prompt(sequences[1])
    late = make(scheduler, 10, 5, 3)
    scheduler.add(late)
    scheduler.admit()
    finish_prompt(late)
    scheduler.next_pass()
    decode = scheduler.next_pass()
    assert isinstance(decode, DecodePass)
    assert [s.request_id for s in decode.sequences] == [0, 1, 2, 3]
    assert decode.num_decoding == 3


@given(st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), max_size=30), st.randoms(use_true_random=False))
def test_whatever_happens_slots_are_compact_and_the_budget_holds(requests, random):
    scheduler = Scheduler(5, 100, 200)
    left = [make(scheduler, p, m, i) for i, (p, m) in enumerate(requests)]
    done = []
    while left or scheduler.running or scheduler.waiting:
        if left and random.random() < 0.5:
            scheduler.add(left.pop())
        scheduler.admit()
        assert [s.slot for s in scheduler.running] == list(range(len(scheduler.running)))
        assert scheduler.reserved == sum(s.limit for s in scheduler.running) <= 200
        work = scheduler.next_pass()
        if work is None:
            continue
        slots = [s.slot for s in work.sequences]
        assert slots == list(range(slots[0], slots[0] + len(slots)))
        if isinstance(work, PromptPass):
            for s, n in zip(work.sequences, work.counts, strict=True):
                assert n >= 1
                s.computed += n
                if not s.in_prompt:
                    s.append([1])
        victim = random.choice(scheduler.running)
        if random.random() < 0.3:
            scheduler.remove(victim)
            done.append(victim.request_id)
    assert sorted(done) == list(range(len(requests)))
