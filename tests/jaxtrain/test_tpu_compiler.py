"""The TPU's own compiler, which needs no TPU, accepts the training step.

It runs in a child process: what it sets up in JAX must not reach the other tests.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

SCRIPT = """
import json, sys
import jax
from jax.experimental import topologies
from jaxtrain.backend import JaxBackend
from shared.config.load import load_config

config = load_config("configs/demo.yaml", sys.argv[1:]).config
topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:1x1", chips_per_host_bounds=(1, 1, 1))
backend = JaxBackend(config, topology.devices)
compiled = backend.step.lower(*backend.abstract_inputs()).compile(
    compiler_options={"exec_time_optimization_effort": -1.0}
)
memory = compiled.memory_analysis()

def size(part):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(part))

state = backend.abstract_state()
text = compiled.as_text()
print(json.dumps({
    "state": size(state), "moments": size(state.optimizer), "parameters": size(state.parameters),
    "arguments": memory.argument_size_in_bytes, "donated": memory.alias_size_in_bytes,
    "host_arguments": memory.host_argument_size_in_bytes, "host_donated": memory.host_alias_size_in_bytes,
    "kernels": text.count("tpu_custom_call"), "loops": text.count(" while("), "products": text.count("convolution("),
}))
"""


REPLICAS = """
import json, sys
from jax.experimental import topologies
from jaxtrain.backend import JaxBackend
from jaxtrain.devices import memory_bytes
from shared.config.load import load_config

config = load_config("configs/demo.yaml", sys.argv[1:]).config
topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2", chips_per_host_bounds=(2, 2, 1))
backend = JaxBackend(config, topology.devices)
state, batch, rates = backend.abstract_inputs()
programs = {"step": (backend.step, state, batch, rates), "evaluation": (backend.evaluate, state.parameters, batch)}
options = {"exec_time_optimization_effort": -1.0}
found = {name: function.lower(*inputs).compile(compiler_options=options).as_text() for name, (function, *inputs)
         in programs.items()}
kernels = {name: text.count("tpu_custom_call") for name, text in found.items()}
print(json.dumps({**kernels, "memory": memory_bytes(topology.devices[0])}))
"""


def compiled(*overrides: str, script: str = SCRIPT) -> dict[str, Any]:
    environment = {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", script, *overrides],
        env=environment | {"PYTHONPATH": ":".join(sys.path)},
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


@pytest.mark.slow
def test_a_v5e_gets_the_step_with_splash_attention_a_layer_scan_and_donated_state() -> None:
    found = compiled("precision=bfloat16", "data.packing=segments", "remat=full", "accumulation.microbatch=4")
    assert found["kernels"] >= 3, "splash attention: forward, recomputed forward, backward"
    assert found["loops"] >= 3, "microbatches, layers forward, layers backward"
    # Every byte of the state is updated in place. TPU layouts pad small arrays, hence the margin upwards.
    assert found["state"] <= found["donated"] <= 1.2 * found["state"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("offload", "parts"),
    [
        (["offload.optimizer=host"], ["moments"]),
        (["offload.optimizer=host", "offload.parameters=host"], ["moments", "parameters"]),
    ],
    ids=["optimizer", "optimizer-and-parameters"],
)
def test_what_is_offloaded_leaves_a_v5es_memory_for_its_hosts(offload: list[str], parts: list[str]) -> None:
    plain, found = compiled("precision=bfloat16"), compiled("precision=bfloat16", *offload)
    offloaded = sum(plain[part] for part in parts)
    assert plain["host_arguments"] == 0
    # The compiler pads small arrays: 508 bytes for AdamW's count of steps.
    assert offloaded <= found["host_arguments"] <= 1.01 * offloaded
    assert plain["arguments"] - found["arguments"] == pytest.approx(found["host_arguments"], rel=0.01)
    assert found["host_donated"] == found["host_arguments"], "and is updated in place there"


@pytest.mark.slow
def test_a_v5e_gets_float32_products_in_bfloat16_where_they_are_asked_for() -> None:
    assert compiled("precision={preset: float32, matmul: bfloat16}")["kernels"] == 0, "in plain attention"


@pytest.mark.slow
def test_replicas_train_and_evaluate_with_splash_attention_on_several_tpus() -> None:
    """A kernel cannot be partitioned: each replica has to run it on its own rows."""
    found = compiled("precision=bfloat16", "parallel.data=2", "accumulation.microbatch=2", script=REPLICAS)
    assert found["step"] >= 2 and found["evaluation"] >= 1
    assert found["memory"] is None, "a TPU that is only compiled for does not say"
