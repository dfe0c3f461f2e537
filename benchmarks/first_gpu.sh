#!/usr/bin/env bash
# The first ten minutes on a GPU (estimated from single parts): does it run, to the bit, what does
# the host cost a step, and how fast is it? Ends in tables.
#
#     benchmarks/first_gpu.sh OUT          # on a machine with a GPU, the `gpu` extra installed
#     benchmarks/first_gpu.sh OUT --dry    # a few small steps on the CPU, to see that it works
#
# Runs go to OUT/<name>, each log beside it; tables.md is printed at the end. A run that fails or
# takes longer than LIMIT seconds is named, and the others go on. PYTHON names the interpreter, and
# PARTS chooses parts: a (equal bits), b (the host), c (throughput), d (beside PyTorch), e (CIFAR-10
# to 94 %), and if they are named f (more throughput) and g (what the compiler chose). d and e need
# ROOT, the dataset.root of CIFAR-10; the other parts train on its synthetic twin. Nothing is
# downloaded.
set -u -o pipefail
out=${1:?usage: first_gpu.sh OUT [--dry]}
dry=${2:-}
root=${ROOT:-}
parts=${PARTS:-a,b,c${root:+,d,e}}
python=${PYTHON:-python3}
mkdir -p "$out" || exit 1
out=$(cd "$out" && pwd)
cd "$(dirname "$0")/.." || exit 1
: >"$out/equal.txt"
: >"$out/failed.txt"

twin="dataset.name=synthetic +dataset.like=cifar10"
stages="stages=[data,build,compile,train]"
if [ -n "$dry" ]; then
    device="device=cpu" short="train.epochs=null train.epochs=null train.steps=6 monitor.tensorboard=false"
else
    device="device=gpu" short=""
fi

has() { case ",$parts," in *",$1,"*) true ;; *) false ;; esac; }

# key=value of a GPU's device section: the CPU of the dry mode has none.
gpu() { [ -n "$dry" ] || echo "$@"; }

if { has d || has e; } && [ -z "$root$dry" ]; then
    echo "first_gpu.sh: parts d and e need ROOT, the dataset.root of CIFAR-10" >&2
    exit 2
fi

# network RECIPE KEY=VALUE...: in the dry mode the default recipe stands for every network.
network() {
    if [ -n "$dry" ]; then echo "+recipe=lenet5_digits"; else echo "+recipe=$*"; fi
}

# limited NAME COMMAND...: a command whose failure is noted and doesn't end the script.
limited() {
    local name=$1 begin=$SECONDS
    shift
    if timeout "${LIMIT:-240}" "$@"; then
        echo "== $name: $((SECONDS - begin)) s"
    else
        echo "$name failed after $((SECONDS - begin)) s" | tee -a "$out/failed.txt"
    fi
}

# r NAME ARGUMENTS...: a run.
r() {
    local name=$1
    shift
    # shellcheck disable=SC2086
    limited "$name" $python -m pipeline "$@" $device $short "hydra.run.dir=$out/$name" >"$out/$name.log" 2>&1
    tail -n 1 "$out/$name.log"
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
    limited "$name" $python -m "$@" >"$out/$name.md" 2>"$out/$name.log"
    tail -n 1 "$out/$name.md"
}

[ -n "$dry" ] || nvidia-smi
$python -m pipeline doctor $device 2>&1 | tee "$out/doctor.log"

if has a; then # Does it run, and to the bit?
    # The first run tunes alone; the others find its choices in XLA's cache and share the device.
    r a1
    export XLA_PYTHON_CLIENT_PREALLOCATE=false
    r a2 &
    r sink_off train.sink=false &
    r sink_7 train.sink_size=7 &
    r soft train.mechanism=soft &
    r graph_step $(gpu device.graphs=step) &
    r graph_loop $(gpu device.graphs=loop) &
    # How far TF32 is from float32.
    device=device=cpu r on_cpu &
    wait
    unset XLA_PYTHON_CLIENT_PREALLOCATE
    for name in a2 sink_off sink_7 soft graph_step graph_loop on_cpu; do
        equal a1 $name
    done
    # Two processes that tune by themselves.
    for k in 1 2; do
        r "resnet18_$k" $(network resnet18_cifar10 $twin train.precision=bf16 train.epochs=null train.steps=300) \
            cache.compiled=false "$stages"
    done
    equal resnet18_1 resnet18_2
fi

if has b; then # What the host costs a step
    steps=2000
    [ -z "$dry" ] || steps=20
    for graphs in auto loop; do
        bench "sink_lenet5_$graphs" benchmarks.sink --recipe lenet5_digits --steps $steps --rounds 1 \
            $device $(gpu device.graphs=$graphs)
        [ -z "$dry" ] || break
    done
fi

resnet9="resnet9_cifar10_speedrun $twin train.epochs=6 eval.every_epochs=null checkpoint.every_epochs=null"
resnet18="resnet18_cifar10 $twin train.epochs=3 checkpoint.best=null eval.every_epochs=null"
resnet50="resnet50_cifar10 $twin train.batch_size=256 train.epochs=null train.sink_size=50 train.steps=200"
vit="resnet50_cifar10 model=vit_tiny $twin train.batch_size=256 train.epochs=null train.sink_size=50 train.steps=200"
bf16=$(gpu train.precision=bf16)

if has c; then # Throughput
    r resnet9_auto $(network $resnet9) $bf16 "$stages"
    r resnet18_auto $(network $resnet18) $bf16 "$stages"
    r resnet18_loop $(network $resnet18) $bf16 $(gpu device.graphs=loop) "$stages"
    r resnet50_auto $(network $resnet50) $bf16 "$stages"
fi

if has d && [ -z "$dry" ]; then # Beside PyTorch
    for precision in bf16 float32; do
        bench "train_resnet18_$precision" benchmarks.train --task resnet18 --precision $precision --rounds 5 \
            --round-s 1.5 --peers torch --root "$root" --override device=gpu
    done
fi

if has e && [ -z "$dry" ]; then # CIFAR-10 to 94 %
    r resnet9_94 +recipe=resnet9_cifar10_speedrun "dataset.root=$root"
    limited whitening $python examples/whitening.py "$out/whitening.npz" cnn6_cifar10_speedrun "dataset.root=$root"
    r cnn6_94 +recipe=cnn6_cifar10_speedrun "checkpoint.restore=$out/whitening.npz" checkpoint.partial=true \
        "dataset.root=$root"
fi

if has f; then # More throughput
    r vit $(network $vit) $bf16 "$stages"
    for graphs in off step loop; do
        r "resnet9_$graphs" $(network $resnet9) $bf16 $(gpu device.graphs=$graphs) "$stages"
        [ -z "$dry" ] || break
    done
    r resnet9_any $(network $resnet9) $bf16 $(gpu device.deterministic=false) "$stages"
    r resnet50_any $(network $resnet50) $bf16 $(gpu device.deterministic=false) "$stages"
    r resnet9_o2 $(network $resnet9) $(gpu train.precision=O2) "$stages"
    r resnet50_o2 $(network $resnet50) $(gpu train.precision=O2) "$stages"
    r resnet18_b1024 $(network $resnet18) $bf16 $(gpu train.batch_size=1024) "$stages"
    r resnet50_stream $(network $resnet50) $bf16 train.feed=stream "$stages"
    for task in resnet50 vit; do
        [ -z "$root" ] || bench "train_${task}_bf16" benchmarks.train --task $task --precision bf16 --rounds 5 \
            --round-s 1.5 --peers torch,torch_compile --root "$root" --override device=gpu
    done
fi

if has g && [ -z "$dry" ]; then # For work without a GPU: what the compiler chose here
    for name in resnet9_cifar10_speedrun resnet50_cifar10; do
        XLA_FLAGS="--xla_dump_to=$out/x_$name --xla_dump_hlo_as_text --xla_gpu_dump_autotune_results_to=$out/tuned_$name.pbtxt" \
            r "dump_$name" $(network $name $twin) train.precision=bf16 train.epochs=null train.epochs=null \
            train.steps=20 cache.compiled=false "$stages"
        tar -czf "$out/x_$name.tgz" -C "$out/x_$name" . --wildcards --exclude='*.ptx' --exclude='*.ll' || true
    done
fi

[ -s "$out/failed.txt" ] || rm "$out/failed.txt"
$python -m benchmarks.gpu_tables "$out" | tee "$out/tables.md"
[ ! -e "$out/failed.txt" ]
