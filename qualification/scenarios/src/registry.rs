//! A registry of images, served beside the releases of a scenario: `docker pull` works from it, over TLS that the machine
//! trusts, and misbehaves by the rules of the release server.

use std::path::Path;

use crate::lab::caches;
use crate::run::host;
use crate::server::{Server, Serving};

/// Makes an image of two layers and its manifest: busybox with a page, and a file that does not compress (so that a pull of
/// it shows how far it is) with zeros behind it that do (so that it is larger when it is unpacked).
const MAKE: &str = r#"set -eu
    root=$1 name=$2 tag=$3 busybox=$4 filler=$5 zeros=$6
    dir=$root/v2/$name work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    mkdir -p "$dir/blobs" "$dir/manifests" "$work/base/bin" "$work/base/www" "$work/more"
    cp "$busybox" "$work/base/bin/busybox"
    ln -s busybox "$work/base/bin/sh"
    echo "page of $name:$tag" >"$work/base/www/index.html"
    head -c "${filler}M" /dev/urandom >"$work/more/filler"
    truncate -s "+${zeros}M" "$work/more/filler"
    sum() { sha256sum "$1" | cut -d' ' -f1; }
    blob() { mv "$1" "$dir/blobs/sha256:$2"; }
    layers='[]' ids='[]'
    for layer in base more; do
        tar -C "$work/$layer" --owner=0 --group=0 -cf "$work/tar" .
        ids=$(echo "$ids" | jq -c --arg id "sha256:$(sum "$work/tar")" '. + [$id]')
        gzip -1nf "$work/tar"
        digest=$(sum "$work/tar.gz") size=$(stat -c %s "$work/tar.gz")
        blob "$work/tar.gz" "$digest"
        layers=$(echo "$layers" | jq -c --arg digest "sha256:$digest" --argjson size "$size" \
            '. + [{mediaType: "application/vnd.docker.image.rootfs.diff.tar.gzip", size: $size, digest: $digest}]')
    done
    jq -nc --argjson ids "$ids" '{architecture: "amd64", os: "linux", rootfs: {type: "layers", diff_ids: $ids},
        config: {Cmd: ["/bin/busybox", "httpd", "-f", "-p", "8080", "-h", "/www"]}}' >"$work/config"
    config=$(sum "$work/config") size=$(stat -c %s "$work/config")
    blob "$work/config" "$config"
    jq -nc --arg config "sha256:$config" --argjson size "$size" --argjson layers "$layers" '{schemaVersion: 2,
        mediaType: "application/vnd.docker.distribution.manifest.v2+json", layers: $layers,
        config: {mediaType: "application/vnd.docker.container.image.v1+json", size: $size, digest: $config}}' >"$work/manifest"
    cp "$work/manifest" "$dir/manifests/sha256:$(sum "$work/manifest")"
    mv "$work/manifest" "$dir/manifests/$tag""#;

/// An image of a registry.
#[derive(Debug, Clone, Copy)]
pub struct Pullable {
    /// `app`
    pub name: &'static str,
    /// `1`
    pub tag: &'static str,
    /// MiB to be pulled.
    pub mib: u32,
    /// MiB more when it is unpacked.
    pub unpacked: u32,
}

impl Pullable {
    /// An image that serves `page of NAME:TAG` at port 8080, with 8 MiB to be pulled.
    pub fn new(name: &'static str, tag: &'static str) -> Self {
        Self { name, tag, mib: 8, unpacked: 0 }
    }
}

impl Serving {
    /// Serves an image too, as `HOST:PORT/NAME:TAG`.
    #[must_use]
    pub fn image(self, image: Pullable) -> Self {
        make(self.root(), image);
        self
    }
}

impl Server {
    /// The name of an image here, as Docker takes it: `releases.ployz.test:8443/app:1`.
    pub fn image(&self, name: &str) -> String {
        format!("{}/{name}", self.url().trim_start_matches("https://"))
    }
}

fn make(root: &Path, image: Pullable) {
    let busybox = caches().join("images/trixie-docker/usr/bin/busybox").display().to_string();
    let (root, mib, unpacked) =
        (root.display().to_string(), image.mib.to_string(), image.unpacked.to_string());
    host(&["bash", "-c", MAKE, "make", &root, image.name, image.tag, &busybox, &mib, &unpacked]).ok();
}
