"""What the planner plans and refuses, rule by rule; the four evaluation cases of the Jetson skill first."""

from __future__ import annotations

import itertools
import shlex
import time
from typing import Any

import pytest

from surespec.models import bundled, from_config
from surespec.plan import brought, plan, runtime_for
from surespec.plan.cost import break_even_length, bytes_per_step, distinct_experts
from surespec.plan.gates import LOAD_CONCURRENCY
from surespec.plan.heads import NGRAM, base_name, draft_for, draft_problem, head_problem, heads_for
from surespec.plan.tuning import batch_schedule, capture_sizes, start_k
from surespec.plan_nouns import GIB, Model, Plan, PlanOptions, Refusal
from surespec.probe.table import device_ids, simulated_device
from surespec.rules import rules

TARGETS = ("Llama-3.1-8B", "Qwen3-8B", "gpt-oss-20b", "Llama-3.3-70B", "Qwen3-30B-A3B")


def known(name: str) -> Model:
    model = bundled(name)
    assert model is not None
    return model


def made(
    device: str,
    model: str | Model = "Llama-3.1-8B",
    *,
    l4t: str = "",
    engine: str = "",
    version: str = "",
    image: str = "",
    **options: Any,
) -> Plan:
    found = simulated_device(device, l4t)
    target = known(model) if isinstance(model, str) else model
    return plan(found, runtime_for(found, engine, version, image), target, PlanOptions(**options))


def refusal(result: Plan, method: str, rule: str) -> Refusal:
    return next(r for r in result.refused if (r.method, r.rule) == (method, rule))


# --- the evaluation cases of jetson-speculative-decoding -----------------------------------------------------------


def test_eval_001_thor_eagle3_k5_and_005_less() -> None:
    arm = made("thor-t5000", gpu_memory_utilization=0.80).arms[0]
    assert (arm.method, arm.num_speculative_tokens, arm.gpu_memory_utilization) == ("eagle3", 5, 0.75)
    assert arm.speculative_config == {
        "method": "eagle3",
        "model": "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B",
        "num_speculative_tokens": 5,
        "draft_tensor_parallel_size": 1,
    }
    assert {"C1", "C3", "C5"} <= set(arm.rules) and arm.fits


def test_eval_002_agx_orin_draft_model_k3() -> None:
    result = made("orin-agx-64gb", "Llama-3.1-8B")
    arm = next(a for a in result.arms if a.method == "draft_model")
    assert arm.num_speculative_tokens == 3 and {"C2", "C3"} <= set(arm.rules)
    assert arm.speculative_config["model"] == "meta-llama/Llama-3.2-1B-Instruct"
    assert arm.speculative_config["draft_tensor_parallel_size"] == 1


def test_eval_003_thresholds_are_the_policy() -> None:
    from surespec.rules import policy

    found = policy("jetson")
    assert (found.keep_throughput_gain, found.keep_tpot_reduction, found.disable_gain) == (0.30, 0.20, 0.10)
    assert found.load_concurrency == LOAD_CONCURRENCY


@pytest.mark.parametrize("device", ["orin-nano-8gb", "orin-nano-4gb", "orin-nx-16gb", "orin-nx-8gb"])
@pytest.mark.parametrize("model", TARGETS)
def test_eval_004_small_orins_are_refused_with_alternatives(device: str, model: str) -> None:
    result = made(device, model)
    assert result.arms == () and result.exit_code == 10
    for method in ("eagle3", "draft_model"):
        instead = " ".join(refusal(result, method, "W4").instead)
        assert "smaller or better-quantised model" in instead and "jetson-inference-mem-tune" in instead


# --- every device and every model, without a network and fast ------------------------------------------------------


@pytest.mark.parametrize("device", device_ids())
@pytest.mark.parametrize("model", TARGETS)
def test_every_device_and_model(device: str, model: str) -> None:
    started = time.perf_counter()
    result = made(device, model)
    assert time.perf_counter() - started < 1.0
    names = rules()
    assert result.arms or result.refused
    for arm in result.arms:
        assert arm.rules == () or set(arm.rules) <= set(names)
        assert arm.fits == (arm.margin_gib >= 0)
        assert arm.fits or arm.changes or any("F4" in note for note in arm.notes)
        assert arm.speculative_config["num_speculative_tokens"] == arm.num_speculative_tokens
        assert arm.arm().name == arm.name
        assert "fly" not in arm.command and "synthetic" not in arm.command
    assert {r.rule for r in result.refused} <= set(names)
    assert len({arm.name for arm in result.arms}) == len(result.arms)
    document = result.document()
    assert document["schema"] == "surespec/plan/1"
    assert {"sku", "memory_gb"} <= set(document["device"])
    assert {"id", "weight_bytes", "kv_bytes_per_token"} <= set(document["model"])


@pytest.mark.parametrize("device", ["thor-t5000", "thor-t4000"])
def test_thor_starts_at_five_and_orin_at_three(device: str) -> None:
    for model in ("Llama-3.1-8B", "Qwen3-8B", "gpt-oss-20b"):
        assert made(device, model).arms[0].name == "eagle3-k5"
        assert made("orin-agx-64gb", model).arms[0].name == "eagle3-k3"


# --- when (W) ---------------------------------------------------------------------------------------------------


def test_w3_ceiling_on_shared_memory_only() -> None:
    result = made("thor-t5000", gpu_memory_utilization=0.90)
    assert result.arms == () and "free 2 GB" in refusal(result, "all", "W3").instead[0]
    assert made("h100", gpu_memory_utilization=0.90).arms
    assert made("thor-t5000", gpu_memory_utilization=0.89).arms


def test_w3_concurrency_eight_refuses_a_fixed_k_and_offers_k_by_batch() -> None:
    result = made("thor-t5000", version="0.31.0", concurrency=(8, 16))
    assert refusal(result, "eagle3", "W3").instead[0].startswith("k by batch size")
    assert all("num_speculative_tokens_per_batch_size" in a.speculative_config for a in result.arms)
    arm = result.arms[0]
    assert {"W3", "K1"} <= set(arm.rules) and any("other view" in note for note in arm.notes)


def test_w3_without_that_field_nothing_is_left() -> None:
    result = made("h100", version="0.23.0", concurrency=(8,))
    assert result.arms == () and refusal(result, "eagle3", "W3")


def test_w3_no_head_offers_a_draft_of_the_family() -> None:
    model = known("Qwen3-14B").model_copy(update={"num_layers": 41, "id": "someone/Qwen3-14B-deeper"})
    result = made("thor-t5000", model)
    assert any("draft_model with Qwen/Qwen3-0.6B" in text for text in refusal(result, "eagle3", "W3").instead)
    assert [a.method for a in result.arms] == ["draft_model", "ngram"]


def test_w2_w6_are_said() -> None:
    assert any("W2" in note for note in made("h100", concurrency=(4,)).notes)
    assert any("W6" in note for note in made("h100", ttft_share=0.7).notes)
    assert not any("W6" in note for note in made("h100", ttft_share=0.2).notes)


# --- configuration (C) --------------------------------------------------------------------------------------------


def test_c4_runtime_by_device_and_l4t() -> None:
    assert made("thor-t5000").runtime.image == "vllm/vllm-openai:latest"
    assert made("orin-agx-64gb", l4t="39.2").runtime.image == "vllm/vllm-openai:latest"
    assert made("orin-agx-64gb", l4t="36.4.3").runtime.image == "ghcr.io/nvidia-ai-iot/vllm:latest-jetson-orin"


def test_c4_never_the_orin_image_on_thor() -> None:
    result = made("thor-t5000", image="ghcr.io/nvidia-ai-iot/vllm:latest-jetson-orin")
    assert refusal(result, "all", "C4") and result.arms == () and result.baseline_command == ""


@pytest.mark.parametrize(("device", "l4t"), [("thor-t5000", "38.4"), ("orin-agx-64gb", "39.2")])
def test_c4_needs_020(device: str, l4t: str) -> None:
    assert refusal(made(device, l4t=l4t, version="0.19.1"), "all", "C4")
    assert made(device, l4t=l4t, version="0.20.0").arms


def test_c4_older_orin_may_be_older() -> None:
    assert made("orin-agx-64gb", l4t="36.4.3", version="0.19.0").arms


def test_c5_both_views_are_given() -> None:
    arm = made("thor-t5000").arms[0]
    note = next(note for note in arm.notes if note.startswith("C5"))
    assert "M1" in note and "0.75 would keep 6.1 GiB more KV" in note


def test_c5_is_set_aside_where_kv_would_be_short() -> None:
    arm = made("orin-agx-32gb").arms[0]
    assert arm.gpu_memory_utilization == 0.70 and {"C5", "M1"} <= set(arm.rules)
    assert any("KV would then be short" in note for note in arm.notes)


def test_c5_once_only() -> None:
    arm = made("thor-t5000", gpu_memory_utilization=0.70, already_speculates=True).arms[0]
    assert arm.gpu_memory_utilization == 0.70 and any("speculates already" in note for note in arm.notes)


# --- memory (M) ---------------------------------------------------------------------------------------------------


def test_m2_names_the_devices_own_precision_first() -> None:
    thor = refusal(made("thor-t5000", "Llama-3.3-70B"), "all", "M2")
    assert "nvidia/Llama-3.3-70B-Instruct-FP4" in thor.instead[0] and "131.4 GiB" in thor.why
    orin = refusal(made("orin-agx-64gb", "Llama-3.3-70B"), "all", "M2")
    assert "w4a16" in orin.instead[0] and not any("FP4" in text or "FP8" in text for text in orin.instead)


def test_seventy_b_in_nvfp4_fits_on_thor_with_its_head() -> None:
    result = made("thor-t5000", "nvidia/Llama-3.3-70B-Instruct-FP4")
    arm = result.arms[0]
    assert arm.drafter is not None and arm.fits
    assert (arm.drafter.id, arm.drafter.match) == ("yuhuili/EAGLE3-LLaMA3.3-Instruct-70B", "variant")


def test_an_arm_that_does_not_fit_lists_what_to_change() -> None:
    result = made("l4", "Llama-3.1-8B", max_model_len=32768)
    arm = result.arms[0]
    assert not arm.fits and arm.changes and arm.margin_gib < 0
    assert result.exit_code == 10 or any(a.fits for a in result.arms)


def test_fp8_weights_on_orin_are_said() -> None:
    assert any(note.startswith("G5") for note in made("orin-agx-64gb", "Qwen/Qwen3-8B-FP8").notes)


def test_tensor_parallel_divides_the_target_not_the_drafter() -> None:
    one = made("h200", "nvidia/Llama-3.3-70B-Instruct-FP8").arms[0].memory
    two = made("h200", "nvidia/Llama-3.3-70B-Instruct-FP8", tensor_parallel=2).arms[0].memory
    assert one is not None and two is not None
    assert two.weights == -(-one.weights // 2) and two.drafter == one.drafter


# --- versions (V) -------------------------------------------------------------------------------------------------


def test_v1_the_dynamic_arm_appears_with_the_field() -> None:
    names = [a.name for a in made("h100", version="0.24.0").arms]
    assert "eagle3-k5-dynamic" in names and names.index("eagle3-k5") < names.index("eagle3-k5-dynamic")
    assert not any("dynamic" in a.name for a in made("h100", version="0.23.0").arms)


@pytest.mark.parametrize("version", ["0.10.0", "0.12.0", "0.14.1"])
def test_v2_draft_model_is_refused_where_it_raises(version: str) -> None:
    why = refusal(made("h100", version=version), "draft_model", "V2").why
    assert "NotImplementedError" in why and "0.10.0 to 0.14.1" in why


def test_v2_eagle3_before_it_existed() -> None:
    assert "0.9.1" in refusal(made("h100", version="0.8.5.post1"), "eagle3", "V2").why


@pytest.mark.parametrize(
    ("model", "version", "allowed"),
    [("Qwen3-8B", "0.9.2", False), ("gpt-oss-20b", "0.10.2", False), ("gpt-oss-20b", "0.11.0", True)],
)
def test_v3_target_allow_list(model: str, version: str, allowed: bool) -> None:
    result = made("h100", model, version=version)
    has = any(a.method == "eagle3" for a in result.arms)
    assert has is allowed
    if not allowed:
        assert refusal(result, "eagle3", "V3").why.endswith("does.")


def test_v4_unknown_version_writes_only_what_the_oldest_takes() -> None:
    result = made("thor-t5000", "Qwen3-8B")
    assert any("V4" in note for note in result.notes)
    assert "may be as old as 0.20" in refusal(result, "dspark", "V4").why
    assert any(a.method == "dspark" for a in made("thor-t5000", "Qwen3-8B", version="0.25.0").arms)


def test_v5_dynamo_is_gated_on_the_pinned_engine() -> None:
    result = made("h100", engine="dynamo")
    assert any("0.31.0" in note for note in result.notes)
    assert any("dynamic" in arm.name for arm in result.arms)  # 0.31 has the field


# --- heads and drafts (H) ---------------------------------------------------------------------------------------


def test_h1_quantised_fine_tuned_and_unrelated_targets() -> None:
    llama = known("Llama-3.1-8B")
    assert heads_for(llama)[0].match == "exact"
    assert heads_for(known("nvidia/Llama-3.1-8B-Instruct-FP4"))[0].match == "variant"
    renamed = llama.model_copy(update={"id": "someone/my-own-tune", "target_of": ()})
    assert {head.match for head in heads_for(renamed)} == {"shape"}
    assert heads_for(renamed.model_copy(update={"vocab_size": 128257})) == ()
    assert heads_for(renamed.model_copy(update={"hidden_size": 4097})) == ()
    arm = made("thor-t5000", renamed).arms[0]
    assert "H1" in arm.rules and any("architecture and vocabulary only" in note for note in arm.notes)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", "llama-3.1-8b-instruct"),
        ("nvidia/Llama-3.1-8B-Instruct-FP4", "llama-3.1-8b-instruct"),
        ("Qwen/Qwen3-8B-AWQ", "qwen3-8b"),
        ("/models/Qwen3-8B", "qwen3-8b"),
        ("Qwen3-8B-Q4_K_M.gguf", "qwen3-8b"),
    ],
)
def test_base_name(name: str, expected: str) -> None:
    assert base_name(name) == expected


def test_h2_a_short_context_head_is_flagged() -> None:
    arm = made("thor-t5000", max_model_len=8192).arms[0]
    assert "H2" in arm.rules and any("2048 tokens" in note for note in arm.notes)
    short = made("thor-t5000", max_model_len=2048).arms[0]
    assert not any("2048 tokens" in note for note in short.notes)


def test_h3_h4_checks_before_launch() -> None:
    llama, qwen, small = known("Llama-3.1-8B"), known("Qwen3-8B"), known("Llama-3.2-1B")
    assert draft_problem(small, llama) == ""
    assert "151936" in draft_problem(small, qwen)
    assert "tokenizer" in draft_problem(
        small.model_copy(update={"tokenizer_hash": "a"}), llama.model_copy(update={"tokenizer_hash": "b"})
    )
    head = llama.model_copy(update={"num_layers": 1})
    assert head_problem(head, llama) == ""
    assert "vocabulary" in head_problem(head, qwen)
    assert "hidden size" in head_problem(head.model_copy(update={"hidden_size": 5120}), llama)


def test_h4_padded_vocabularies_of_qwen25_are_refused() -> None:
    model = known("Qwen3-8B").model_copy(update={"id": "Qwen/Qwen2.5-Coder-7B-Instruct", "vocab_size": 152064})
    found, why = draft_for(model)
    assert found is None and "151936" in why and "152064" in why


def test_h7_big_drafts() -> None:
    small = known("Qwen/Qwen3-8B-AWQ").model_copy(update={"weight_bytes": 2 * GIB})
    assert refusal(made("thor-t5000", small), "draft_model", "H7")
    arm = next(a for a in made("thor-t5000", "nvidia/Llama-3.1-8B-Instruct-FP4").arms if a.method == "draft_model")
    assert any("H7" in note for note in arm.notes)


def test_a_brought_drafter_replaces_the_tables() -> None:
    device = simulated_device("h100")
    result = plan(device, runtime_for(device), known("Qwen3-8B"), drafters=[NGRAM])
    assert [a.method for a in result.arms] == ["ngram"] and result.refused == ()


def test_own_mtp_layers_become_an_arm() -> None:
    config = {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "num_hidden_layers": 46,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151552,
        "num_nextn_predict_layers": 1,
    }
    model = from_config(config, "zai-org/GLM-4.5-Air", checkpoint_bytes=60 * GIB)
    result = made("h200", model)
    arm = result.arms[0]
    assert (arm.method, arm.num_speculative_tokens) == ("mtp", 3)
    assert arm.speculative_config == {"method": "mtp", "num_speculative_tokens": 3}


# --- engines (E), tuning (G), k (K) ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "engine"), [("orin-agx-64gb", "sglang"), ("thor-t5000", "trtllm"), ("thor-t5000", "dynamo")]
)
def test_e1_engines_without_a_build(device: str, engine: str) -> None:
    assert refusal(made(device, engine=engine), "all", "E1") and made(device, engine=engine).exit_code == 10


def test_e6_embedded_engine() -> None:
    assert refusal(made("cpu", "gpt-oss-20b"), "all", "E6")
    names = [a.name for a in made("cpu", "smollm2-135m").arms]
    assert names == ["eagle3-k5", "eagle3-k5-dynamic", "ngram-k5"]


def test_llamacpp_only_heads_it_is_known_to_convert() -> None:
    assert made("h100", "Llama-3.1-8B", engine="llamacpp").arms[0].method == "eagle3"
    result = made("h100", "Qwen3-8B", engine="llamacpp")
    assert "llamacpp" in refusal(result, "eagle3", "V2").why


def test_known_problem_of_small_qwen_drafts_is_said() -> None:
    arm = next(a for a in made("h100", "Qwen3-8B").arms if a.method == "draft_model")
    assert any("vllm#21278" in note for note in arm.notes)


def test_g1_capture_sizes_contain_the_verify_widths() -> None:
    sizes = capture_sizes(2, 32)
    assert {3, 6, 9, 12} <= set(sizes) and sizes == sorted(set(sizes))

    def said(version: str) -> list[str]:
        return [t.why for t in made("h100", version=version).arms[0].tuning if t.rule == "G1"]

    assert "older than 0.31" in said("")[0] and "older" not in said("0.25.0")[0]
    assert said("0.31.0") == []  # adds them itself; sizes set by hand would replace its better default


def test_g2_needs_the_version() -> None:
    def flags(version: str) -> set[str]:
        return {t.flag for t in made("h100", version=version).arms[0].tuning}

    assert "speculative_config.attention_backend" not in flags("0.20.0")
    assert "speculative_config.attention_backend" in flags("0.21.0")
    orin = {t.flag for t in made("orin-agx-64gb", version="0.26.0").arms[0].tuning}
    assert "speculative_config.kv_cache_dtype" in orin


def test_g4_floor_of_batched_tokens() -> None:
    arm = made("h100", max_num_seqs=256, max_num_batched_tokens=1024).arms[0]
    assert [t.value for t in arm.tuning if t.rule == "G4"] == [str(256 * 6)]


def test_g8_power_mode() -> None:
    device = simulated_device("thor-t5000").model_copy(update={"power_mode": "70W"})
    result = plan(device, runtime_for(device), known("Llama-3.1-8B"))
    assert any("70W" in note for note in result.notes)


@pytest.mark.parametrize("load", [False, True])
@pytest.mark.parametrize("k", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("seqs", [1, 8, 16, 256])
def test_k1_schedule_is_what_vllm_accepts(load: bool, k: int, seqs: int) -> None:
    """From 1, inclusive, without gaps or overlaps, never rising, within 0..k."""
    table = batch_schedule(k, seqs, keep_under_load=load)
    assert table[0][0] == 1 and all(low <= high for low, high, _ in table)
    assert all(a[1] + 1 == b[0] for a, b in itertools.pairwise(table))
    steps = [entry[2] for entry in table]
    assert steps == sorted(steps, reverse=True) and steps[0] == k and min(steps) >= 0


def test_k2_experts() -> None:
    assert distinct_experts(128, 8, 1) == pytest.approx(8.0)
    assert 8 < distinct_experts(128, 8, 6) < 48
    moe, dense = known("Qwen3-30B-A3B"), known("Llama-3.1-8B")
    assert bytes_per_step(moe, 6) / bytes_per_step(moe, 1) > 2
    assert bytes_per_step(dense, 6) == bytes_per_step(dense, 1)
    assert break_even_length(moe, NGRAM, 5) > 2 > break_even_length(dense, NGRAM, 5)


def test_break_even_is_below_what_was_measured_on_thor() -> None:
    """FP4 with the head at k = 5 gained 34 % on Thor, so its acceptance length was at least 1.34 x the step's cost."""
    arm = made("thor-t5000", "nvidia/Llama-3.1-8B-Instruct-FP4").arms[0]
    assert arm.break_even_length is not None and 1.3 < arm.break_even_length < 6 / 1.34


def test_k4_an_arm_that_can_never_pay_is_refused() -> None:
    target = known("Qwen/Qwen3-8B-AWQ").model_copy(update={"weight_bytes": round(2.3 * GIB)})
    result = made("orin-agx-64gb", target)
    assert "4 is the most" in refusal(result, "draft_model", "K4").why


def test_k2_a_smaller_k_is_offered_for_experts() -> None:
    arm = made("thor-t5000", "Qwen3-30B-A3B").arms[0]
    assert any(note.startswith("K2") and "at k = 2" in note for note in arm.notes)


def test_cost_of_wide_steps_is_near_the_measured_one() -> None:
    """vllm-mlx PR#763: widths 2, 3, 5, 8 cost 1.59, 1.84, 2.44, 3.32 times one on a MoE of 128 experts; within 30 %."""
    model = known("Qwen3-30B-A3B")
    for width, measured in ((2, 1.59), (3, 1.84), (5, 2.44), (8, 3.32)):
        assert bytes_per_step(model, width) / bytes_per_step(model, 1) == pytest.approx(measured, rel=0.30)


def test_start_k_respects_a_heads_own_limit() -> None:
    dspark = next(h for h in heads_for(known("Qwen3-8B")) if h.method == "dspark")
    assert start_k("gpu", dspark)[0] == 4 and start_k("gpu", dspark.model_copy(update={"max_k": 2}))[0] == 2


def test_commands_carry_the_users_choices() -> None:
    arm = made("h100", max_num_seqs=16, kv_cache_dtype="fp8", port=9001, host="0.0.0.0", max_model_len=4096).arms[0]
    argv = shlex.split(arm.command)
    for flag, value in (
        ("--max-num-seqs", "16"),
        ("--kv-cache-dtype", "fp8"),
        ("--port", "9001"),
        ("--host", "0.0.0.0"),
        ("--max-model-len", "4096"),
    ):
        assert argv[argv.index(flag) + 1] == value


def test_the_context_never_exceeds_the_models() -> None:
    assert made("h100", "Qwen3-8B", max_model_len=100000).max_model_len == 40960


def test_plans_are_deterministic() -> None:
    assert made("thor-t5000", "Qwen3-8B") == made("thor-t5000", "Qwen3-8B")


# --- drafters that the user brings -----------------------------------------------------------------------------------


def head_config(**changes: Any) -> dict[str, Any]:
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "draft_vocab_size": 32000,
        "max_position_embeddings": 2048,
    }
    return {**config, **changes}


def test_a_brought_head_is_planned_and_sized_by_its_files() -> None:
    head = from_config(head_config(), "me/my-head", checkpoint_bytes=900_000_000)
    found = brought(head, known("Llama-3.1-8B"))
    assert not isinstance(found, Refusal)
    assert (found.method, found.weight_bytes, found.kv_bytes_per_token) == ("eagle3", 900_000_000, 4096)
    device = simulated_device("thor-t5000")
    result = plan(device, runtime_for(device), known("Llama-3.1-8B"), drafters=[found])
    assert result.arms[0].speculative_config["model"] == "me/my-head"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"hidden_size": 5120}, "hidden size"),
        ({"vocab_size": 32000, "draft_vocab_size": 32000}, "vocabulary"),
        ({"draft_vocab_size": 200000}, "drafts from 200000"),
    ],
)
def test_h3_a_head_of_another_target_is_refused(changes: dict[str, Any], word: str) -> None:
    found = brought(from_config(head_config(**changes), "me/head"), known("Llama-3.1-8B"))
    assert isinstance(found, Refusal) and found.rule == "H3" and word in found.why
    device = simulated_device("thor-t5000")
    result = plan(device, runtime_for(device), known("Llama-3.1-8B"), drafters=[found])
    assert result.arms == () and result.refused == (found,)


def test_heads_in_the_speculators_format_are_read() -> None:
    layer = {k: v for k, v in head_config().items() if k not in ("architectures", "draft_vocab_size")}
    config = {"speculators_model_type": "eagle3", "draft_vocab_size": 32000, "transformer_layer_config": layer}
    head = from_config(config, "RedHatAI/x")
    assert (head.drafts, head.draft_vocab_size, head.hidden_size) == ("eagle3", 32000, 4096)


def test_a_brought_draft_model() -> None:
    found = brought(known("Llama-3.2-1B"), known("Llama-3.1-8B"))
    assert not isinstance(found, Refusal) and found.method == "draft_model"
    other = brought(known("Llama-3.2-1B"), known("Qwen3-8B"))
    assert isinstance(other, Refusal) and other.rule == "H4"


def test_a_native_engine_on_a_jetson_needs_no_image() -> None:
    board = simulated_device("thor-t5000")
    native = runtime_for(board, "vllm", "0.21.0", native=True)
    assert native.image == ""
    assert plan(board, native, known("Llama-3.1-8B")).arms[0].command.startswith("vllm serve ")


def hybrid_mtp(**changes: Any) -> Model:
    config = {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "num_hidden_layers": 48,
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "vocab_size": 151936,
        "full_attention_interval": 4,
        "linear_num_value_heads": 32,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_nextn_predict_layers": 1,
        **changes,
    }
    return from_config(config, "Qwen/some-hybrid", checkpoint_bytes=20 * GIB)


def test_known_bugs_of_hybrid_mtp_models() -> None:
    arm = made("thor-t5000", hybrid_mtp(), version="0.26.0").arms[0]
    assert arm.method == "mtp" and "K5" in arm.rules
    assert any("vllm#53912" in note for note in arm.notes) and any("vllm#53462" in note for note in arm.notes)
    elsewhere = made("h100", hybrid_mtp(), version="0.26.0").arms[0]
    assert not any("vllm#53462" in note for note in elsewhere.notes)


@pytest.mark.parametrize(("layers", "k"), [(1, 3), (2, 2), (3, 3), (4, 3)])
def test_k6_mtp_k_is_a_multiple_of_the_layers(layers: int, k: int) -> None:
    arm = made("h100", hybrid_mtp(num_nextn_predict_layers=layers)).arms[0]
    assert arm.num_speculative_tokens == k
    assert ("K6" in arm.rules) is (layers == 2)


def test_e4_old_llamacpp_knows_only_a_draft_model() -> None:
    result = made("h100", "Llama-3.1-8B", engine="llamacpp", old_llamacpp_flags=True)
    assert [a.method for a in result.arms] == ["draft_model"] and "--draft-max" in result.arms[0].command
    assert refusal(result, "eagle3", "E4") and refusal(result, "ngram", "E4")


def test_d3_d4_are_said_for_dynamo() -> None:
    notes = made("h100", engine="dynamo").notes
    assert any("/v1/chat/completions" in note for note in notes) and any("etcd" in note for note in notes)
