"""The largest arrays of a pass, by name and source line."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import eqaccum
from eqaccum._plan import largest_arrays

ROWS, WIDTH = 8, 1000


def loss(model, x, key):
    hidden = jnp.sin(x[0] * model)  # WIDTH numbers of each row
    return jnp.sum(jnp.cos(hidden) * hidden)


def made(**more):
    return eqaccum.plan(
        jnp.ones(WIDTH),
        np.ones((ROWS, 1), np.float32),
        loss=loss,
        optimizer=optax.sgd(0.1),
        global_batch=ROWS,
        microbatch=4,
        **more,
    )


def test_arrays_of_a_pass_are_named_with_their_line():
    arrays = made().arrays
    lines, first = inspect.getsourcelines(loss)
    places = {f"tests/{__file__.rsplit('/')[-1]}:{first + i}" for i in (1, 2)}
    assert arrays
    assert [a.bytes for a in arrays] == sorted((a.bytes for a in arrays), reverse=True)
    assert arrays[0].shape == f"f32[4,{WIDTH}]"
    assert arrays[0].bytes == 4 * 4 * WIDTH
    # the loss is defined here and called by eqaccum: the line is the loss's own
    assert arrays[0].source in places
    assert "eqaccum" not in arrays[0].name


def test_a_plan_shows_them_as_a_guide_and_keeps_them():
    plan = made()
    shown = str(plan)
    assert "a guide" in shown and "no sum" in shown
    for array in plan.arrays:
        assert array.shape in shown and array.source in shown
    assert eqaccum.Plan.from_dict(plan.to_dict()) == plan


def test_what_a_fusion_makes_on_its_way_has_no_place():
    text = jax.jit(scoped).lower(jnp.ones(WIDTH)).compile().as_text()
    fused = [a for a in largest_arrays(text) if f"[{WIDTH}]" in a.shape]
    # sin, cos, times: one loop, one array
    assert sum(a.count for a in fused) == 1


def scoped(x):
    with jax.named_scope("eqaccum/microbatch"):
        return jnp.sin(x) * jnp.cos(x)


TEXT = """HloModule jit_step, is_scheduled=true

FileNames
1 "/home/me/model.py"
2 "/usr/lib/python3/site-packages/equinox/nn/_linear.py"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=1 end_column=2}
2 {file_name_id=2 function_name_id=2 line=99 end_line=99 column=1 end_column=2}

StackFrames
1 {file_location_id=1 PARENT_OF_1}
2 {file_location_id=2 PARENT_OF_2}

%inside (p: f32[100]) -> f32[900] {
  ROOT %x = f32[900]{0} exponential(%p), metadata={op_name="a/eqaccum/microbatch/exp"}
}

ENTRY %main (p: f32[100]) -> f32[100] {
  %p = f32[100]{0} parameter(0)
  %f = bf16[2,900]{1,0} fusion(%p), kind=kLoop, calls=%inside, metadata={op_name="jit(step)/eqaccum/microbatch/Linear/dot" stack_frame_id=2}
  %g = (f32[100]{0}, u8[4096]{0}) custom-call(%p), custom_call_target="gemm", metadata={op_name="jit(step)/eqaccum/microbatch/gemm" source_file="/a/b/c.py" source_line=7}
  %h = pred[300]{0} compare(%f, %f), metadata={op_name="jit(step)/eqaccum/microbatch/less"}
  %sum = f32[100000]{0} add(%f, %f), metadata={op_name="jit(step)/add"}
  ROOT %t = (bf16[2,900]{1,0}) tuple(%f), metadata={op_name="jit(step)/eqaccum/microbatch/t"}
}
"""  # noqa: E501


@pytest.mark.parametrize("parents", [("1", "2"), ("0", "1")], ids=["off", "right"])
def test_a_text_by_hand(parents):
    """Both ways of counting parents lead to the user's own line."""
    text = TEXT
    for number, parent in enumerate(parents, 1):
        text = text.replace(f"PARENT_OF_{number}", f"parent_frame_id={parent}")
    found = [(a.bytes, a.shape, a.name, a.source) for a in largest_arrays(text)]
    assert found == [
        (4096, "u8[4096]", "gemm", "b/c.py:7"),
        (3600, "bf16[2,900]", "Linear/dot", "me/model.py:12"),
        (400, "f32[100]", "gemm", "b/c.py:7"),
        (300, "pred[300]", "less", ""),
    ]


def test_a_text_without_names():
    assert largest_arrays("") == ()
    assert largest_arrays("HloModule a\nENTRY %main () -> f32[] {\n}\n") == ()
