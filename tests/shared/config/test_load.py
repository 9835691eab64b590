from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shared.config.document import read_document
from shared.config.load import load_config
from shared.config.recipe import IDENTITY
from shared.config.schema import Config, CosineSchedule, Llama, TargetOverrides, TextSource
from shared.errors import UserError
from tests.shared.config.example import failure, load


def never() -> str:
    raise AssertionError("the accelerator was looked for without need")


def test_the_example_is_read_as_written(tmp_path: Path) -> None:
    config = load(tmp_path).config
    assert isinstance(config.model, Llama) and config.model.rms_norm_eps == 1e-5
    assert config.model.rope_theta == 10000.0 and isinstance(config.model.rope_theta, float)
    assert config.execution.attention == "reference" and config.execution.jax.layers == "scan"
    assert config.accumulation.microbatch is None and config.remat.policy == "none"


@pytest.mark.parametrize("path", sorted(Path("configs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_config_is_valid_for_each_of_its_targets(path: Path) -> None:
    for target in [None, *read_document(path).values.get("targets", {})]:
        assert load_config(path, target=target).target == target


# ------------------------------------------------------------------------------------------------------------ targets


def test_a_target_overrides_single_fields_and_leaves_their_neighbours(tmp_path: Path) -> None:
    resolved = load(tmp_path, target="cpu")
    assert resolved.target == "cpu"
    assert resolved.config.execution.jax.layers == "unroll"
    assert resolved.config.execution.attention == "reference"
    assert resolved.config.accumulation.microbatch == 4
    assert resolved.config.remat.policy == "none"


def test_the_command_line_overrides_the_target(tmp_path: Path) -> None:
    config = load(tmp_path, "accumulation.microbatch=2", "remat=none", target="cpu").config
    assert config.accumulation.microbatch == 2


def test_the_command_line_can_change_a_target_and_add_one(tmp_path: Path) -> None:
    assert load(tmp_path, "targets.v5e-1.remat=none", target="v5e-1").config.remat.policy == "none"
    assert load(tmp_path, "targets.t4.remat=full", target="t4").config.remat.policy == "full"


def test_a_change_to_the_merged_section_does_not_change_the_target_it_came_from(tmp_path: Path) -> None:
    config = load(tmp_path, "accumulation.microbatch=8", target="cpu").config
    target = config.targets["cpu"].accumulation
    assert config.accumulation.microbatch == 8 and target is not None and target.microbatch == 4


def test_a_target_can_set_a_field_back_to_null(tmp_path: Path) -> None:
    config = load(
        tmp_path, "accumulation={microbatch: 8}", "targets.cpu.accumulation.microbatch=null", target="cpu"
    ).config
    assert config.targets["cpu"].accumulation is not None
    assert config.accumulation.microbatch == 8  # the command line has the last word
    text = ("precision: float32", "precision: float32\ncheckpoint: {every: 5}")
    assert (
        load(tmp_path, "targets.cpu.checkpoint.every=null", replace=text, target="cpu").config.checkpoint.every is None
    )


def test_a_target_left_null_overrides_nothing(tmp_path: Path) -> None:
    config = load(tmp_path, "targets.v5e-1.execution=null", target="v5e-1").config
    assert config.execution.attention == "reference" and config.remat.policy == "full"


def test_the_detected_accelerator_chooses_the_target(tmp_path: Path) -> None:
    assert load(tmp_path, detect=lambda: "v5e-1").target == "v5e-1"
    assert load(tmp_path, detect=lambda: "v5e-1").config.remat.policy == "full"


def test_a_detected_accelerator_without_an_entry_changes_nothing(tmp_path: Path) -> None:
    resolved = load(tmp_path, detect=lambda: "a100-80")
    assert resolved.target is None and resolved.config == load(tmp_path).config


def test_nothing_is_detected_when_the_target_is_given_or_there_are_none(tmp_path: Path) -> None:
    assert load(tmp_path, target="cpu", detect=never).target == "cpu"
    assert load(tmp_path, "targets={}", detect=never).target is None


def test_an_unknown_target_is_answered_with_the_nearest(tmp_path: Path) -> None:
    assert failure(tmp_path, target="v5e") == (
        "--target v5e: not a target of " + str(tmp_path / "config.yaml").replace(f"{tmp_path}/", "")
        + "; did you mean 'v5e-1'?"
    )  # fmt: skip
    assert failure(tmp_path, "targets={}", target="cpu") == "--target cpu: config.yaml has no targets"


def test_only_the_chosen_target_must_fit_the_run(tmp_path: Path) -> None:
    bad_elsewhere = ("microbatch: 4", "microbatch: 5")
    assert load(tmp_path, replace=bad_elsewhere, target="v5e-1").target == "v5e-1"
    assert failure(tmp_path, replace=bad_elsewhere, target="cpu") == (
        "config.yaml:41: accumulation.microbatch (5) must divide batch.global_batch (16); nearest valid: 4"
    )


def test_a_mistake_in_the_file_is_told_though_the_target_would_replace_it(tmp_path: Path) -> None:
    assert failure(tmp_path, replace=("jax: {layers: scan}", "jax: {layers: loop}"), target="cpu") == (
        "config.yaml:37: execution.jax.layers cannot be 'loop'; valid choices: auto, scan, unroll"
    )


def test_a_rule_between_sections_is_checked_after_the_target_is_merged(tmp_path: Path) -> None:
    too_large = ("precision: float32", "precision: float32\naccumulation: {microbatch: 32}")
    assert load(tmp_path, replace=too_large, target="cpu").config.accumulation.microbatch == 4
    assert "microbatch (32) must divide" in failure(tmp_path, replace=too_large)


def test_a_mistake_is_told_before_the_accelerator_is_looked_for(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="stepz"):
        load(tmp_path, "schedule.stepz=3", detect=never)


def test_sections_are_either_identity_or_open_to_targets() -> None:
    sections = set(Config.model_fields) - {"targets"}
    overridable = set(TargetOverrides.model_fields)
    assert set(IDENTITY) | overridable == sections
    assert not set(IDENTITY) & overridable


@pytest.mark.parametrize("section", IDENTITY)
def test_a_target_may_not_touch_the_recipe(tmp_path: Path, section: str) -> None:
    message = failure(tmp_path, replace=("remat: full", f"{section}: 1"), target="v5e-1")
    assert message.startswith(f"config.yaml:43: targets.v5e-1.{section}: a target may not change the run itself, only ")


def test_a_mistake_in_a_target_is_told_once_and_where_it_stands(tmp_path: Path) -> None:
    wrong = ("remat: full", "remat: ful")
    expected = "config.yaml:43: targets.v5e-1.remat cannot be 'ful'; did you mean 'full'?"
    assert failure(tmp_path, replace=wrong, target="v5e-1") == expected
    assert failure(tmp_path, replace=wrong) == expected


# ---------------------------------------------------------------------------------------------------------- overrides


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("schedule.steps=100", "schedule.steps", 100),
        ("schedule.learning_rate=1e-3", "schedule.learning_rate", 0.001),
        ("model.head_dim=null", "model.head_dim", None),
        ("model.tie_word_embeddings=false", "model.tie_word_embeddings", False),
        ("data.source.files=*.txt", "data.source.files", "*.txt"),
        ("data.source.files=a=b/**/*.txt", "data.source.files", "a=b/**/*.txt"),
        ("data.source.files='true'", "data.source.files", "true"),
        (" evaluation.every = 5", "evaluation.every", 5),
        ("execution={jax: {layers: auto}}", "execution.attention", "auto"),
        ("data.source={kind: text, files: x}", "data.source.files", "x"),
    ],
)
def test_an_override_sets_its_field(tmp_path: Path, override: str, path: str, value: object) -> None:
    found: Any = load(tmp_path, override).config
    for key in path.split("."):
        found = getattr(found, key)
    assert found == value and type(found) is type(value)


def test_the_last_override_wins(tmp_path: Path) -> None:
    assert load(tmp_path, "schedule.steps=100", "schedule.steps=200").config.schedule.steps == 200


def test_an_override_can_replace_a_section_and_a_later_one_refine_it(tmp_path: Path) -> None:
    section = "schedule={name: cosine, steps: 9, learning_rate: 1, warmup_steps: 0, final_learning_rate: 0}"
    schedule = load(tmp_path, section, "schedule.steps=7").config.schedule
    assert isinstance(schedule, CosineSchedule)
    assert (schedule.steps, schedule.learning_rate) == (7, 1.0)


def test_an_override_can_switch_a_variant_key_by_key(tmp_path: Path) -> None:
    source = load(tmp_path, "data.source.kind=jsonl", "data.source.field=body").config.data.source
    assert not isinstance(source, TextSource) and source.kind == "jsonl" and source.field == "body"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("schedule.stepz=3", "schedule.stepz is not a known key; did you mean 'steps'?"),
        ("modle.hidden_size=3", "modle is not a known key; did you mean 'model'?"),
        ("learning_rate=3", "learning_rate is not a known key; did you mean 'schedule.learning_rate'?"),
        ("remat.x=1", "remat.x is not a known key; valid choices: budget, every, names, policy"),
        ("seed.x=1", "seed is the number 1, not a section; set it with seed=VALUE"),
        ("model.family.x.y=1", "model.family is the text 'llama', not a section; set it with model.family=VALUE"),
        ("schedule.steps=", "a value is missing after '='; an empty one is written null"),
        ("schedule.steps=ten", "schedule.steps must be a whole number; got the text 'ten'"),
        ("schedule.steps=1e3", "schedule.steps must be a whole number; got the number 1000.0; write 1000"),
        ("schedule.steps={a: 1, a: 2}", "schedule.steps.a is given twice; first on line 1"),
        ("schedule.steps=[1", "not valid YAML: expected ',' or ']', but got '<stream end>'"),
        ("schedule.steps", "expected KEY.PATH=VALUE, such as schedule.steps=100"),
        ("=3", "expected KEY.PATH=VALUE, such as schedule.steps=100"),
        ("schedule..steps=3", "expected KEY.PATH=VALUE, such as schedule.steps=100"),
        ("batch=null", "batch must be a section of 'key: value' lines; got null"),
    ],
)
def test_a_wrong_override_is_its_own_location(tmp_path: Path, override: str, message: str) -> None:
    assert failure(tmp_path, override) == f"{override} on the command line: {message}"


def test_a_switched_variant_names_the_keys_it_leaves_behind_and_how_to_replace_them(tmp_path: Path) -> None:
    assert failure(tmp_path, "schedule.name=constant") == (
        "schedule.name=constant on the command line: schedule.final_learning_rate belongs to name 'cosine' or 'wsd', "
        "but schedule.name is 'constant'; replace the section: "
        "'schedule={name: constant, steps: 600, learning_rate: 0.003, warmup_steps: 40}'"
    )


def test_a_switched_variant_that_also_lacks_a_key_leaves_a_gap_for_it(tmp_path: Path) -> None:
    assert failure(tmp_path, "optimizer.name=sgd") == (
        "optimizer.name=sgd on the command line: optimizer.beta1 belongs to name 'adamw', but optimizer.name is 'sgd'; "
        "replace the section: 'optimizer={name: sgd, weight_decay: 0.1, clip_norm: 1.0, momentum: ...}' (and 3 more)"
    )


def test_a_key_of_another_variant_on_the_command_line_is_itself_to_blame(tmp_path: Path) -> None:
    section = "schedule={name: constant, steps: 9, learning_rate: 1, warmup_steps: 0}"
    assert failure(tmp_path, section, "schedule.decay_steps=3") == (
        "schedule.decay_steps=3 on the command line: schedule.decay_steps belongs to name 'wsd', "
        "but schedule.name is 'constant'"
    )


def test_the_replacement_that_an_error_proposes_works(tmp_path: Path) -> None:
    proposal = failure(tmp_path, "schedule.name=constant").rpartition("replace the section: ")[2].strip("'")
    assert load(tmp_path, proposal).config.schedule.name == "constant"


def test_a_switched_variant_names_the_key_it_lacks(tmp_path: Path) -> None:
    assert failure(tmp_path, "schedule.name=wsd") == (
        "schedule.name=wsd on the command line: schedule.decay_steps is missing; name 'wsd' needs it"
    )


def test_a_rule_broken_by_an_override_blames_the_override(tmp_path: Path) -> None:
    assert failure(tmp_path, "model.num_attention_heads=3") == (
        "model.num_attention_heads=3 on the command line: "
        "model.num_key_value_heads (2) must divide num_attention_heads (3)"
    )
