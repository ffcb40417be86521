# SPDX-License-Identifier: Apache-2.0
"""Two examples for each command, each with a comment that says what it does."""

from functools import cache

_TEXT = """
# train a small model on scikit-learn's digits
saccade train nac --data digits --out build/digits.safetensors
# your own images, one folder per class, on a pretrained trunk
saccade train sot --data photos --trunk vit-base --out photos.safetensors

# convert a folder of a model hub, which has the labels too
saccade convert vit-base --out build/vit.safetensors
# convert a SPARO model, with its training configuration
saccade convert sparo-clip epoch_32.pt --config c.json --out sparo.safetensors

# upload a checkpoint folder, with a token in HF_TOKEN
saccade upload build/animals --repo user/animals
# the same into a branch of a new private repository
saccade upload build/animals --repo user/animals --revision trial --private

# fetch a model's folder from the Hugging Face hub
saccade download google/vit-base-patch16-224 --out vit-base
# fetch it at a tag or a commit, over an older copy
saccade download google/vit-base-patch16-224@main --out vit-base --force

# list every family and size
saccade models
# list the sizes of one family
saccade models slot-attention

# rank slots by their zero-shot accuracy
saccade select shipped:sparo-shapes --out build/slots.json
# train a mask of whole slots instead
saccade select shipped:sparo-shapes --masks slot --out build/slots.json

# score a checkpoint on the data set it was trained for
saccade evaluate shipped:digits-sum --data digits-sum
# score every variant of a folder on 200 samples
saccade evaluate build/digits-sum --data digits-sum --limit 200

# export a shipped checkpoint at its family's budgets
saccade export shipped:digits-sum --out build/digits-sum
# export two budgets in two precisions
saccade export my.safetensors --budget 1,0.5 --precision fp32,fp16 --out my

# check every exported file again
saccade verify build/digits-sum
# name the first node of each graph that differs
saccade verify build/digits-sum --bisect

# build an engine for every variant
saccade build build/digits-sum
# build for batches of 1 to 64, fastest at 16
saccade build build/digits-sum --engine tensorrt-rtx --batch 1,16,64

# measure score and throughput of every variant
saccade bench build/digits-sum --out build/report
# take a quick look, without a server
saccade bench build/digits-sum --no-server --limit 200 --out build/quick

# export and measure three budgets
saccade sweep shipped:digits-sum --budget 1,0.5,0.25 --out build/sweep
# retry the points that failed
saccade sweep shipped:digits-sum --budget 1,0.5,0.25 --retry --out build/sweep

# find the fastest variant that scores at least 92 %
saccade choose build/digits-sum --min-score 0.92
# find the best variant that answers within 5 ms
saccade choose build/digits-sum --max-latency-ms 5

# answer easy images with less compute and lose at most 1 % of the answers
saccade calibrate build/digits-sum --data digits-sum
# certify two policies, both chosen on the validation images
saccade calibrate build/digits-sum --risk 0.005,0.02 --choose-split validation

# compute the replicas for 500 requests per second
saccade plan build/digits-sum --rps 500 --slo-ms 20
# keep one replica in reserve
saccade plan build/digits-sum --rps 500 --slo-ms 20 --spare 1

# write the folder that a server loads
saccade repository build/digits-sum --out build/repository
# limit the queue to 64 requests
saccade repository build/digits-sum --max-queue 64 --out build/repository

# check a repository before it is deployed
saccade preflight build/repository
# check that it fits into 2 GiB of memory
saccade preflight build/repository --memory-mib 2048

# serve over gRPC on this machine
saccade serve build/repository
# print the command for NVIDIA's container instead
saccade serve build/repository --print-command --container

# put two servers behind one address
saccade proxy 127.0.0.1:8001,127.0.0.1:8101 --out build/envoy.yaml
# listen on another port
saccade proxy 127.0.0.1:8001 --listen 127.0.0.1:9001 --out build/envoy.yaml

# answer a folder of images
saccade bulk build/digits-sum --input photos --out build/answers
# embed the images of a table in four processes
saccade bulk build/sparo --input a.parquet --ask embed --workers 4 --out out

# answer about images without a server
saccade predict build/digits-sum cat.png dog.png
# use at most a quarter of the budget
saccade predict build/digits-sum cat.png --budget 0.25

# get three labels per image
saccade classify cat.png dog.png --model digits-sum
# use at most a quarter of the budget
saccade classify cat.png --model digits-sum --budget 0.25

# embed two images
saccade embed cat.png dog.png --model sparo --out build/images.npz
# embed the lines of a text file
saccade embed --texts captions.txt --model sparo --out build/texts.npz

# draw which slot each pixel belongs to
saccade segment scene.png --model slots --out build/masks
# use eight slots and two rounds of attention
saccade segment scene.png --model slots --slots 8 --budget t2 --out masks

# ask a question about an image
saccade answer scene.png --model vqa --question 'what shape is left ?'
# get only the best answer
saccade answer scene.png --model vqa --question 'is there a circle ?' --top 1

# describe an image in a sentence
saccade caption scene.png --model captioner
# search with five sentences at a time, of at most 12 words
saccade caption scene.png --model captioner --beam 5 --max-length 12

# move the content of slot 1 to the right
saccade edit scene.png --model slots --slot 1 --move 0.3,0 --out moved.png
# remove slot 1
saccade edit scene.png --model slots --slot 1 --remove --out removed.png

# draw where a model looked
saccade show cat.png --model sot --out build/shown.png
# compare two models side by side
saccade show cat.png --model sot --against other --out build/both.png

# open a page in your browser to try your own images
saccade explore build/digits-sum --open
# for a server that is already running
saccade explore --url 127.0.0.1:8001

# train, export, verify, serve, classify and measure
saccade demo
# write to another folder
saccade demo --out my-demo

# show what a file is, and what to do with it
saccade inspect shipped:digits-sum
# find the converter for a checkpoint from elsewhere
saccade inspect epoch_32.pt

# list the custom ops and what can run them here
saccade ops
# build their kernels first
saccade ops --build

# list what is installed, and what is missing for each use
saccade doctor
# check that every variant of a running server answers
saccade doctor --url 127.0.0.1:8001

# complete commands and options in bash
saccade completion bash > ~/.local/share/bash-completion/completions/saccade
# the same in zsh, in a folder in your fpath
saccade completion zsh > ~/.zfunc/_saccade
"""


@cache
def examples() -> dict[str, str]:
    """Return the examples of each command, each below its comment."""
    blocks = _TEXT.strip().split("\n\n")
    return {block.splitlines()[1].split()[1]: block for block in blocks}


def first_example(command: str) -> str:
    """Return the command line of a command's first example."""
    return examples()[command].splitlines()[1]
