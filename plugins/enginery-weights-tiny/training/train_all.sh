# Trains the embedded model and its two drafters on one GPU and evaluates them, in about 12 minutes; everything comes back in $OUT.
# From the repository root: bash plugins/enginery-weights-tiny/training/train_all.sh   (needs python3 with torch, tokenizers, safetensors, numpy)
# Seconds for the two trainings, compilation among them, and the model's size can be changed for a trial:
#   OUT=out TARGET="--steps 200 --rows 8 --length 512 --small" DRAFTS="..." EVALUATE="--scale 0.04 --small" bash plugins/enginery-weights-tiny/training/train_all.sh
: "${TARGET:=--seconds 380 --rate 3e-3}" "${DRAFTS:=--seconds 90 --rate 3e-3}" "${EVALUATE:=}" "${SHARDS:=--count 1000 --processes 6}" "${PY:=python3}"
mkdir -p "$OUT"; OUT=$(realpath "$OUT"); W=${WORK:-$(mktemp -d)}; mkdir -p "$W/shards" "$W/out"
rm -f "$W/shards/stop" "$W/out/training.json"
cd plugins/enginery-weights-tiny/training || exit 1
set -o pipefail
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-4} PYTHONUNBUFFERED=1
say() { echo "== $SECONDS s: $*" | tee -a "$OUT/log.txt"; }
A="--out $W/out --shards $W/shards"
COUNT=$(echo "$SHARDS" | grep -oE -- '--(count|shard-tokens) [0-9]+' | tr '\n' ' ')
OMP_NUM_THREADS=1 nice -n 5 $PY run.py shards $A $SHARDS > "$W/shards.txt" 2>&1 &
GENERATOR=$!
say "target"; $PY run.py target $A $COUNT $TARGET 2>&1 | tee -a "$OUT/log.txt" || { touch "$W/shards/stop"; exit 1; }
tar -cf "$OUT/checkpoint.tar" -C "$W/out" checkpoint; cp "$W/out/training.json" "$OUT/"
say "$(ls "$W/shards" | wc -l) shards written so far; drafts"; $PY run.py drafts $A $COUNT $DRAFTS 2>&1 | tee -a "$OUT/log.txt"
touch "$W/shards/stop"
tar -cf "$OUT/drafts.tar" -C "$W/out" draft eagle; cp "$W/out/training.json" "$OUT/"
say "evaluation"; timeout 200 $PY run.py evaluate $A $EVALUATE 2>&1 | tee -a "$OUT/log.txt"
cp "$W/out/evaluation.json" "$W/out/samples.md" "$W/out/loss.svg" "$OUT/"
wait $GENERATOR; cat "$W/shards.txt" >> "$OUT/log.txt"
say "done"; ls -l "$OUT"
