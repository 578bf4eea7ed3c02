#!/usr/bin/env bash
# The main job on real data: which similarity should these two encoders be trained with?
set -euo pipefail
cd "$(dirname "$0")/.."
began=$SECONDS
offsphere compare --config demo/wordllama.yaml --out runs/demo/wordllama
offsphere compare --config demo/minilm.yaml --out runs/demo/minilm
offsphere report runs/demo/wordllama runs/demo/minilm --out runs/demo/report.html
echo "took     $((SECONDS - began)) s"
