//! What is published: static, small, reproducible executables, for both architectures.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failed assumption fails the test"
)]

use std::fs;
use std::path::Path;
use std::time::Duration;

use scenarios::{Release, host, host_within, release, release_for, repository, scratch};

const MIB: u64 = 1024 * 1024;

fn shown(path: &Path) -> String {
    path.display().to_string()
}

/// A directory with nothing in it but this executable.
fn alone(name: &str, release: &Release) -> String {
    let dir = scratch().join(name);
    fs::create_dir_all(&dir).unwrap();
    fs::copy(release.ployzd(), dir.join("ployzd")).unwrap();
    shown(&dir)
}

fn is_static_and_stripped(release: &Release, architecture: &str) {
    let said = host(&["file", "-b", &shown(&release.ployzd())]).expect(0);
    let said = said.says(&["ELF 64-bit", architecture, ", stripped"]);
    assert!(
        said.text().contains("statically linked") || said.text().contains("static-pie linked"),
        "{}",
        said.text()
    );
    let needed = host(&["readelf", "-dW", &shown(&release.ployzd())]).stdout;
    assert!(!needed.contains("NEEDED"), "{needed}");
    let size = fs::metadata(release.ployzd()).unwrap().len();
    assert!(size <= 6 * MIB, "{size} bytes");
}

#[test]
fn ployzd_is_static_and_small_and_runs_in_an_empty_root() {
    let release = release("1.4.0");
    is_static_and_stripped(&release, "x86-64");
    let run = host(&["chroot", &alone("empty-amd64", &release), "/ployzd", "version"]).expect(0);
    assert_eq!(run.stdout, "ployzd 1.4.0\n");
    assert_eq!(run.stderr, "");
    let listed = host(&["tar", "-tvzf", &shown(&release.archive())]).expect(0);
    assert_eq!(listed.text().lines().count(), 1, "{}", listed.text());
    assert!(listed.text().starts_with("-rwxr-xr-x 0/0 "), "{}", listed.text());
    let checked = format!("cd {} && exec sha256sum --strict -c checksums.txt", shown(&release.dir));
    host(&["sh", "-c", &checked]).ok();
}

#[test]
fn ployzd_for_arm64_is_static_and_small_and_says_its_version() {
    let release = release_for("arm64", "1.4.0");
    is_static_and_stripped(&release, "aarch64");
    let run = host(&["qemu-aarch64-static", &shown(&release.ployzd()), "version", "--json"]).expect(0);
    let about = run.json();
    assert_eq!((&about["version"], &about["target"]), (&"1.4.0".into(), &"aarch64-linux".into()), "{about}");
    let help = host(&["qemu-aarch64-static", &shown(&release.ployzd()), "install", "--help"]).expect(0);
    let _ = help.says(&["--software-only"]);
}

#[test]
fn the_bootstrap_is_small() {
    let size = fs::metadata(repository().join("bootstrap/machine.sh")).unwrap().len();
    assert!(size <= 6 * 1024, "{size} bytes");
}

/// Builds a clone in an environment; the archive.
fn build(tree: &Path, environment: &[&str]) -> String {
    let (script, out) = (shown(&tree.join("qualification/release")), shown(&tree.join("target/out")));
    let call = [script.as_str(), "1.4.0", "--out", &out];
    host_within(Duration::from_secs(1500), &[&["env"], environment, &call].concat()).ok();
    format!("{out}/releases/download/v1.4.0/ployzd_linux_amd64.tar.gz")
}

#[test]
#[ignore = "compiles everything from nothing, for minutes; run with --include-ignored"]
fn two_builds_in_two_places_are_the_same_bytes() {
    // Two clones of one moment, and for the second one caches in which nothing is built yet: only the toolchain and
    // the packages are those of this host.
    let (tree, other) = (scratch().join("clone"), scratch().join("another/clone/of/ployz"));
    for to in [&tree, &other] {
        fs::create_dir_all(to).unwrap();
        let from = if to == &tree { repository() } else { tree.clone() };
        let words = [
            "rsync",
            "-a",
            "--exclude=/target",
            "--exclude=/.git",
            &format!("{}/", shown(&from)),
            &shown(to),
        ];
        host(&words).ok();
    }
    let caches = scratch().join("another/cache");
    fs::create_dir_all(&caches).unwrap();
    let shared = std::env::var("PLOYZ_QUALIFICATION_DIR").unwrap_or("/var/cache/ployz-qualification".into());
    std::os::unix::fs::symlink(format!("{shared}/musl"), caches.join("musl")).unwrap();

    let first = build(&tree, &[&format!("PLOYZ_QUALIFICATION_DIR={shared}")]);
    let odd = ["TZ=Asia/Kolkata", "LC_ALL=C.UTF-8", "USER=somebody"];
    let second = build(
        &other,
        &[&[format!("PLOYZ_QUALIFICATION_DIR={}", shown(&caches)).as_str()], &odd[..]].concat(),
    );
    let sums = host(&["sha256sum", &first, &second]).expect(0);
    let digests: Vec<&str> = sums.text().lines().map(|line| &line[..64]).collect();
    assert_eq!(digests[0], digests[1], "the same sources, built in two places");
}
