"""Collectives in XLA's text of a program."""

from kerasdist.cli.plan.hlo import Collective, collectives, device_work

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


# Shortened from a program for TPU v5e whose state the replicas divide.
FUSED = """HloModule jit_program, is_scheduled=true

%all-reduce-scatter.2 (a: f32[64,1024], b: f32[1024,1024]) -> (f32[64,256], f32[256,1024]) {
  %a = f32[64,1024]{1,0:T(8,128)} parameter(0)
  %b = f32[1024,1024]{1,0:T(8,128)} parameter(1)
  %sum = (f32[64,1024]{1,0:T(8,128)}, f32[1024,1024]{1,0:T(8,128)}) all-reduce(%a, %b), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %parts = (f32[64,256]{1,0:T(8,128)}, f32[256,1024]{1,0:T(8,128)}) custom-call(%sum)
}

%fused.1 (c: f32[256,1024]) -> (f32[256,1024], f32[1024,1024]) {
  %c = f32[256,1024]{1,0:T(8,128)S(1)} parameter(0)
  %all-gather.1 = f32[1024,1024]{1,0:T(8,128)} all-gather(%c), channel_id=8, replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, dimensions={0}
  ROOT %begun = (f32[256,1024]{1,0:T(8,128)S(1)}, f32[1024,1024]{1,0:T(8,128)S(1)}) custom-call(%c, %all-gather.1)
}

%async_collective_fusion.2 (d: f32[256,1024]) -> f32[100] {
  %d = f32[256,1024]{1,0:T(8,128)S(1)} parameter(0)
  %all-gather.2 = f32[1024,1024]{1,0:T(8,128)} all-gather(%d), channel_id=8, replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, dimensions={0}
  ROOT %other = f32[100]{0:T(128)} custom-call(%all-gather.2)
}

%fused.3 (e: f32[256,1024]) -> f32[1024,1024] {
  %e = f32[256,1024]{1,0:T(8,128)S(1)} parameter(0)
  ROOT %all-gather.3 = f32[1024,1024]{1,0:T(8,128)} all-gather(%e), channel_id=8, replica_groups=mesh['axis_0'=2,'axis_1'=4] {'axis_1'}, dimensions={0}
}

ENTRY %main (x: f32[64,1024], y: f32[1024,1024]) -> f32[1024,1024] {
  %x = f32[64,1024]{1,0:T(8,128)} parameter(0)
  %y = f32[1024,1024]{1,0:T(8,128)} parameter(1)
  %scattered = (f32[64,256]{1,0:T(8,128)}, f32[256,1024]{1,0:T(8,128)}) fusion(%x, %y), kind=kCustom, calls=%all-reduce-scatter.2
  %part = f32[300]{0:T(128)} fusion(%scattered), kind=kLoop, calls=%c, backend_config={"estimated_cycles":"100"}
  %async-collective-start = (f32[256,1024]{1,0:T(8,128)S(1)}, f32[1024,1024]{1,0:T(8,128)S(1)}) fusion(%part), kind=kCustom, calls=%fused.1, backend_config={"estimated_cycles":"50"}
  %fusion.49 = f32[100]{0:T(128)} fusion(%async-collective-start), kind=kOutput, calls=%async_collective_fusion.2, backend_config={"estimated_cycles":"200"}
  ROOT %async-collective-done = f32[1024,1024]{1,0:T(8,128)S(1)} fusion(%fusion.49), kind=kCustom, calls=%fused.3, backend_config={"estimated_cycles":"50"}
}
"""  # noqa: E501


def test_collectives_that_a_tpu_fuses_with_other_work():
    scattered, gathered = collectives(FUSED)
    assert scattered == Collective("reduce-scatter", 4 * (64 + 1024) * 1024, 4, 0.0)
    assert gathered == Collective("all-gather", 4 * 1024 * 1024, 4, 200 / 300)


# Shortened from a program for TPU v5e; a loop of 12 steps reads rows of a stacked array.
TPU = """HloModule jit_program, is_scheduled=true

%body (p: (s32[], f32[12,100])) -> (s32[], f32[12,100]) {
  %p = (s32[]{:T(128)}, f32[12,100]{1,0}) parameter(0)
  %row = f32[12,100]{1,0:T(8,128)} get-tuple-element(%p), index=1
  ROOT %step = f32[100]{0:T(128)S(1)} fusion(%row), kind=kLoop, calls=%c, backend_config={"estimated_cycles":"10"}
}

%condition (q: (s32[], f32[12,100])) -> pred[] {
  %limit = s32[]{:T(128)} constant(12)
  ROOT %less = pred[]{:T(512)} compare(%q, %limit), direction=LT
}

ENTRY %main (x: f32[1000]) -> f32[1000] {
  %x = f32[1000]{0:T(128)} parameter(0)
  %buffer = f32[1000]{0:T(128)S(1)} custom-call(), custom_call_target="AllocateBuffer"
  %fetch = (f32[1000]{0:T(128)S(1)}, f32[1000]{0:T(128)}, u32[]{:S(2)}) copy-start(%x)
  %fetched = f32[1000]{0:T(128)S(1)} copy-done(%fetch)
  %loop = (s32[], f32[12,100]{1,0}) while(%fetched), condition=%condition, body=%body
  ROOT %result = f32[1000]{0:T(128)} fusion(%fetched, %x), kind=kLoop, calls=%d, backend_config={"estimated_cycles":"100"}
}
"""  # noqa: E501


def test_work_of_loops_and_of_memory_on_the_chip():
    fetched, result, rows = 4 * 1000, 2 * 4 * 1000, 12 * 4 * 100
    assert device_work(TPU) == (fetched + result + rows, 12 * 10 + 100)


def test_work_where_xla_names_the_steps_of_a_loop_or_knows_no_cycles():
    text = TPU.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"3"}}')
    assert device_work(text)[1] == 3 * 10 + 100
    text = TPU.replace('"estimated_cycles":"100"', f'"estimated_cycles":"{2**63 - 1}"')
    assert device_work(text)[1] == 12 * 10


def test_work_without_an_estimate():
    # Reads and writes of fusions; of the collectives none.
    moved = 4 * (128 * 256 + 100) + 4 * (300 + 8 * 128)
    assert device_work(GPU) == (moved, 0)


def test_a_program_without_collectives():
    assert collectives("") == []
    assert device_work("") == (0, 0)
