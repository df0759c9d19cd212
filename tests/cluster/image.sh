# The images that the cluster's nodes are given, by the scripts of manifests/image.
# shellcheck shell=bash

# pack_image NAMES ROOT OUT PROGRAM: ROOT's files as an image that runs PROGRAM; NAMES are separated
# by commas.
pack_image() {
  "$repository/manifests/image/pack" "$1" "$4" "$3" "$2"
}

# What `kubectl apply -k manifests` asks for: nodes that hold it never ask a registry.
image_of_manifests() {
  sed -n 's/^ *image: *//p' "$repository/manifests/operator.yaml"
}

# build_images PROGRAM FOLDER: moejob.tar, pause.tar and idle.tar in FOLDER.
build_images() {
  local program=$1 folder=$2 root
  mkdir -p "$folder"
  root=$(mktemp -d)
  chmod 755 "$root"
  "$repository/manifests/image/root" "$program" "$root"
  pack_image "localhost/moejob:test,$(image_of_manifests)" "$root" "$folder/moejob.tar" /moejob
  rm -rf "$root"
  root=$(mktemp -d)
  chmod 755 "$root"
  cc -O2 -Wall -Werror -static -o "$root/pause" "$here/pause.c"
  pack_image localhost/pause:test "$root" "$folder/pause.tar" /pause
  # A worker that never does anything: its /moejob only waits.
  mv "$root/pause" "$root/moejob"
  pack_image localhost/idle:test "$root" "$folder/idle.tar" /moejob
  rm -rf "$root"
}
