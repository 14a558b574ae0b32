//! Releases of this tree, built by `qualification/release` when a scenario first asks for them.
//!
//! With `PLOYZ_BUILT=DIR` they are kept there, and what is there is not built again: so all test programs of one run
//! see the same bytes, whatever is edited meanwhile.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::lab::{repository, scratch};
use crate::run::{host, host_within};

/// A clean build of one version takes a minute on two cores, and may wait for another build.
const BUILD: Duration = Duration::from_secs(900);

/// A built release, in a directory of its own.
#[derive(Debug, Clone)]
pub struct Release {
    /// `1.4.0`
    pub version: String,
    /// Holds the archives and `checksums.txt`.
    pub dir: PathBuf,
    /// Of its `ployzd`, as `sha256sum` says it.
    pub sha256: String,
}

impl Release {
    /// The archive of `ployzd`.
    pub fn archive(&self) -> PathBuf {
        self.dir.join(archive_name(&self.dir))
    }

    /// `checksums.txt`
    pub fn checksums(&self) -> PathBuf {
        self.dir.join("checksums.txt")
    }

    /// The executable in it.
    pub fn ployzd(&self) -> PathBuf {
        self.dir.join("ployzd")
    }

    /// This release with a text in its executable exchanged for another of the same length: for what no build of
    /// this tree does. The text must be there, and once.
    #[track_caller]
    #[must_use]
    pub fn changed(&self, from: &str, to: &str) -> Self {
        assert_eq!(from.len(), to.len(), "an executable keeps its length");
        let mut bytes = fs::read(self.ployzd()).expect("reading an executable");
        let places: Vec<usize> =
            (0..bytes.len()).filter(|at| bytes[*at..].starts_with(from.as_bytes())).collect();
        assert_eq!(places.len(), 1, "{from:?} is there so many times");
        bytes[places[0]..places[0] + from.len()].copy_from_slice(to.as_bytes());
        static NUMBER: AtomicUsize = AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let dir = scratch().join(format!("changed-{number}"));
        fs::create_dir_all(&dir).expect("making a directory");
        fs::copy(self.ployzd(), dir.join("ployzd")).expect("copying an executable with its mode");
        fs::write(dir.join("ployzd"), bytes).expect("writing an executable");
        let (shown, archive) = (dir.display().to_string(), archive_name(&self.dir));
        host(&[
            "tar",
            "-C",
            &shown,
            "--owner=0",
            "--group=0",
            "-czf",
            &format!("{shown}/{archive}"),
            "ployzd",
        ])
        .ok();
        let sums = format!("{}  {archive}\n", sha256(&dir.join(&archive)));
        fs::write(dir.join("checksums.txt"), sums).expect("writing checksums");
        Self { version: self.version.clone(), sha256: sha256(&dir.join("ployzd")), dir }
    }

    /// The digest of the archive.
    pub fn archive_sha256(&self) -> String {
        sha256(&self.archive())
    }
}

/// The release of this version, for this architecture.
pub fn release(version: &str) -> Release {
    built(version, &[])
}

/// The same version with other bytes: so many MiB of padding follow its end.
pub fn release_padded(version: &str, mib: u32) -> Release {
    built(version, &["--pad", &mib.to_string()])
}

/// The release for `amd64` or `arm64`.
pub fn release_for(architecture: &str, version: &str) -> Release {
    built(version, &["--arch", architecture])
}

/// A release of this version whose `ployzd` is a program of `qualification/variants`.
pub fn release_variant(version: &str, variant: &str) -> Release {
    built(version, &["--variant", variant])
}

/// Built once in this process; `qualification/release` has a cache for everything else.
fn built(version: &str, options: &[&str]) -> Release {
    static BUILT: Mutex<Option<HashMap<String, Release>>> = Mutex::new(None);
    let name = format!("{version}{}", options.join(""));
    let mut built = BUILT.lock().unwrap_or_else(PoisonError::into_inner);
    let built = built.get_or_insert_with(HashMap::new);
    if let Some(release) = built.get(&name) {
        return release.clone();
    }
    let kept = std::env::var_os("PLOYZ_BUILT").map(PathBuf::from);
    let out = kept.unwrap_or_else(|| scratch().join("releases")).join(&name);
    let dir = out.join("releases/download").join(format!("v{version}"));
    if !dir.join("ployzd").exists() {
        build(version, options, &out, &dir);
    }
    let release = Release { version: version.to_owned(), sha256: sha256(&dir.join("ployzd")), dir };
    built.insert(name, release.clone());
    release
}

fn build(version: &str, options: &[&str], out: &Path, dir: &Path) {
    let script = repository().join("qualification/release").display().to_string();
    let mut words = vec![script.as_str(), version, "--no-pointer", "--out"];
    let path = out.display().to_string();
    words.push(&path);
    words.extend(options);
    host_within(BUILD, &words).ok();
    let archive = dir.join(archive_name(dir)).display().to_string();
    let unpacked = dir.join(".unpacked");
    fs::create_dir_all(&unpacked).expect("making a directory");
    host(&["tar", "-C", &unpacked.display().to_string(), "-xzf", &archive, "ployzd"]).ok();
    // Last, and whole: it says that the release is complete.
    fs::rename(unpacked.join("ployzd"), dir.join("ployzd")).expect("unpacking a release");
}

fn archive_name(dir: &Path) -> String {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names
        .find(|name| name.starts_with("ployzd_"))
        .unwrap_or_else(|| panic!("no archive of ployzd in {dir:?}"))
}

fn sha256(path: &Path) -> String {
    let run = host(&["sha256sum", &path.display().to_string()]).expect(0);
    run.text().split(' ').next().unwrap_or_default().to_owned()
}
