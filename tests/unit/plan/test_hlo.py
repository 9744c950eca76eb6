"""Collectives in XLA's text of a program."""

import pytest

from kerasdist.plan.hlo import Collective, collectives, size_of

# Shortened from a program for 8 H100.
GPU = """HloModule jit_program, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

ENTRY %main (p0: f32[128,256], p1: f32[8,128]) -> (f32[128,256], f32[]) {
  %p0 = f32[128,256]{1,0} parameter(0)
  %p1 = f32[8,128]{1,0} parameter(1)
  %before = f32[100]{0} fusion(%p0), kind=kLoop, calls=%c1
  %all-reduce-start = (f32[128,256]{1,0}, f32[]) all-reduce-start(%before, %p1), channel_id=1, replica_groups=[1,8]<=[8], to_apply=%add
  %between = f32[300]{0} fusion(%p1), kind=kLoop, calls=%c2
  %all-reduce-done = (f32[128,256]{1,0}, f32[]) all-reduce-done(%all-reduce-start)
  %moments = f32[2,16]{1,0} all-reduce(%between), replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  %gather-start = (bf16[8,64]{1,0}, bf16[64,64]{1,0}) all-gather-start(%between), replica_groups=[4,2]<=[8], dimensions={0}
  %gather-done = bf16[64,64]{1,0} all-gather-done(%gather-start)
  %scatter = bf16[8,64]{1,0} reduce-scatter(%gather-done), replica_groups=[4,2]<=[8], to_apply=%add
  ROOT %result = (f32[128,256]{1,0}, f32[]) tuple(%all-reduce-done, %moments)
}
"""  # noqa: E501


def test_kinds_sizes_groups_and_overlap():
    first, moments, gathered, scattered = collectives(GPU)
    assert first == Collective("all-reduce", 4 * 128 * 256 + 4, 8, 0.75)
    assert moments == Collective("all-reduce", 2 * 16 * 4, 8, 0.0)
    assert gathered == Collective("all-gather", 2 * 64 * 64, 2, 0.0)
    assert scattered == Collective("reduce-scatter", 2 * 2 * 8 * 64, 2, 0.0)


def test_a_program_without_collectives():
    assert collectives("") == []


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[]", 4),
        ("bf16[8,128]{1,0:T(8,128)(2,1)}", 2048),
        ("(f32[2]{0}, s32[3]{0}, pred[5])", 25),
        ("f64[0,3]", 0),
        ("f8e4m3fn[16]", 16),
        ("u32[2]{0}", 8),
        ("token[]", 0),
    ],
)
def test_sizes_of_shapes(shape, size):
    assert size_of(shape) == size
