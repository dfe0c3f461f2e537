#!/usr/bin/env bash
# The first half hour on a GPU: does it run, to the bit, what does the host cost a step, and how fast
# is it? Ends in tables.
#
#     benchmarks/first_gpu.sh OUT          # on a machine with a GPU, the `gpu` extra installed
#     benchmarks/first_gpu.sh OUT --dry    # a few small steps on the CPU, to see that it works
#
# Runs go to OUT/<name>, each log beside it; tables.md is printed at the end. A run that fails is
# named, and the others go on. PARTS=a,b,c,d chooses parts; PYTHON names the interpreter. The data
# are CIFAR-10's synthetic twin: nothing is downloaded.
set -u -o pipefail
out=${1:?usage: first_gpu.sh OUT [--dry]}
dry=${2:-}
parts=${PARTS:-a,b,c,d}
python=${PYTHON:-python3}
mkdir -p "$out" || exit 1
out=$(cd "$out" && pwd)
cd "$(dirname "$0")/.." || exit 1
failed=()
: >"$out/equal.txt"

twin="dataset.name=synthetic +dataset.like=cifar10"
stages="stages=[data,build,compile,train]"
if [ -n "$dry" ]; then
    device="device=cpu" short="train.epochs=null train.passes=null train.steps=6 monitor.tensorboard=false"
else
    device="device=gpu" short=""
fi

has() { case ",$parts," in *",$1,"*) true ;; *) false ;; esac; }

# key=value of a GPU's device section: the CPU of the dry mode has none.
gpu() { [ -n "$dry" ] || echo "$@"; }

# network RECIPE KEY=VALUE...: in the dry mode the default recipe stands for every network.
network() {
    if [ -n "$dry" ]; then echo "+recipe=lenet5_digits"; else echo "+recipe=$*"; fi
}

# r NAME ARGUMENTS...: a run.
r() {
    local name=$1
    shift
    echo "== $name: $*"
    # shellcheck disable=SC2086
    if ! $python -m pipeline "$@" $device $short "hydra.run.dir=$out/$name" >"$out/$name.log" 2>&1; then
        failed+=("$name")
        tail -n 3 "$out/$name.log"
    fi
}

# equal A B: whether two runs have the same numbers.
equal() {
    $python -m pipeline diff "$out/$1" "$out/$2" >"$out/diff_$1_$2.log" 2>&1
    echo "$1 and $2: $(grep -m 1 '^steps' "$out/diff_$1_$2.log" || tail -n 1 "$out/diff_$1_$2.log")" >>"$out/equal.txt"
}

# bench NAME MODULE ARGUMENTS...: a benchmark that prints a table.
bench() {
    local name=$1
    shift
    echo "== $name: $*"
    $python -m "$@" >"$out/$name.md" 2>"$out/$name.log" || failed+=("$name")
}

[ -n "$dry" ] || nvidia-smi
$python -m pipeline doctor $device 2>&1 | tee "$out/doctor.log"

if has a; then # Does it run, and to the bit?
    r a1 && r a2 && equal a1 a2
    r sink_off train.sink=false && equal a1 sink_off
    r soft train.mechanism=soft && equal a1 soft
    r graph_step $(gpu device.graphs=step) && equal a1 graph_step
    r graph_loop $(gpu device.graphs=loop) && equal a1 graph_loop
    for k in 1 2; do
        r "resnet18_$k" $(network resnet18_cifar10 $twin train.precision=bf16 train.passes=null train.steps=300) \
            cache.compiled=false "$stages"
    done
    equal resnet18_1 resnet18_2
    # How far TF32 is from float32.
    device=device=cpu r on_cpu && equal a1 on_cpu
fi

if has b; then # What the host costs a step
    steps=4000 rounds=2
    [ -z "$dry" ] || steps=20 rounds=1
    for graphs in auto step loop; do
        bench "sink_lenet5_$graphs" benchmarks.sink --recipe lenet5_digits --steps $steps --rounds $rounds \
            $device $(gpu device.graphs=$graphs)
        bench "sink_mlp_$graphs" benchmarks.sink --steps $steps --rounds $rounds \
            model=mlp train.batch_size=16 $device $(gpu device.graphs=$graphs)
        [ -z "$dry" ] || break
    done
fi

if has c; then # Throughput
    resnet9="resnet9_cifar10_speedrun $twin train.passes=6 eval.every_passes=null checkpoint.every_passes=null"
    resnet18="resnet18_cifar10 $twin train.passes=3 checkpoint.best=null eval.every_passes=null"
    resnet50="resnet50_cifar10 $twin train.batch_size=256 train.epochs=null train.steps=150"
    vit="resnet50_cifar10 model=vit_tiny $twin train.batch_size=256 train.epochs=null train.steps=100"
    bf16=$(gpu train.precision=bf16)
    for graphs in auto step loop; do
        r "resnet9_$graphs" $(network $resnet9) $bf16 $(gpu device.graphs=$graphs) "$stages"
        r "resnet18_$graphs" $(network $resnet18) $bf16 $(gpu device.graphs=$graphs) "$stages"
        r "resnet50_$graphs" $(network $resnet50) $bf16 $(gpu device.graphs=$graphs) "$stages"
        [ -z "$dry" ] || break
    done
    r vit $(network $vit) $bf16 "$stages"
    r resnet9_any $(network $resnet9) $bf16 $(gpu device.deterministic=false) "$stages"
    r resnet50_any $(network $resnet50) $bf16 $(gpu device.deterministic=false) "$stages"
    r resnet9_o2 $(network $resnet9) $(gpu train.precision=O2) "$stages"
    r resnet50_o2 $(network $resnet50) $(gpu train.precision=O2) "$stages"
    r resnet18_b1024 $(network $resnet18) $bf16 $(gpu train.batch_size=1024) "$stages"
    r resnet50_stream $(network $resnet50) $bf16 train.feed=stream "$stages"
fi

if has d && [ -z "$dry" ]; then # For work without a GPU: what the compiler chose here
    for name in resnet9_cifar10_speedrun resnet50_cifar10; do
        XLA_FLAGS="--xla_dump_to=$out/x_$name --xla_dump_hlo_as_text --xla_gpu_dump_autotune_results_to=$out/tuned_$name.pbtxt" \
            r "dump_$name" $(network $name $twin) train.precision=bf16 train.epochs=null train.passes=null \
            train.steps=20 cache.compiled=false "$stages"
        tar -czf "$out/x_$name.tgz" -C "$out/x_$name" . --wildcards --exclude='*.ptx' --exclude='*.ll' || true
    done
fi

[ ${#failed[@]} -eq 0 ] || echo "FAILED: ${failed[*]}" | tee "$out/failed.txt"
$python -m benchmarks.gpu_tables "$out" | tee "$out/tables.md"
[ ${#failed[@]} -eq 0 ]
