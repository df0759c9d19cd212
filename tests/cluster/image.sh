# Images without Docker or a registry: an image is a tar of a layer, a config and a manifest. Their
# files are those of manifests/image/Containerfile.
# shellcheck shell=bash

# pack_image NAMES ROOT OUT PROGRAM: ROOT's files as an image, which runs PROGRAM as a user without
# rights; NAMES are separated by commas. Times and owners are fixed: the same files give the same image.
pack_image() {
  local names=$1 root=$2 out=$3 program=$4 work digest config
  work=$(mktemp -d)
  tar -C "$root" --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -cf "$work/layer.tar" .
  digest=$(sha256sum "$work/layer.tar" | cut -d' ' -f1)
  cat >"$work/config.json" <<JSON
{"architecture":"$(image_architecture)","os":"linux",
 "config":{"User":"65532:65532","Entrypoint":["$program"],"WorkingDir":"/"},
 "rootfs":{"type":"layers","diff_ids":["sha256:$digest"]}}
JSON
  config=$(sha256sum "$work/config.json" | cut -d' ' -f1)
  mv "$work/config.json" "$work/$config.json"
  echo "[{\"Config\":\"$config.json\",\"RepoTags\":[\"${names//,/\",\"}\"],\"Layers\":[\"layer.tar\"]}]" \
    >"$work/manifest.json"
  tar -C "$work" -cf "$out" manifest.json "$config.json" layer.tar
  rm -rf "$work"
}

image_architecture() {
  case $(uname -m) in
    x86_64) echo amd64 ;;
    aarch64) echo arm64 ;;
    *) uname -m ;;
  esac
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
