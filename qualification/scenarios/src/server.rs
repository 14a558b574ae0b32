//! A release server of one scenario: its own root, port, rules and log, so that no scenario disturbs another.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU16, Ordering};

use serde_json::{Value, json};

use crate::lab::{lab, repository, scratch};
use crate::releases::Release;
use crate::run::{Run, host, host_within};

/// What a server is to serve; see [`serve`].
#[derive(Debug)]
pub struct Serving {
    root: PathBuf,
    certificate: &'static str,
}

/// A server, ended when this value is dropped.
#[derive(Debug)]
pub struct Server {
    child: Child,
    root: PathBuf,
    port: u16,
}

/// A server for the scenario of this name, with the Machine's bootstrap at `/machine` and nothing else yet.
pub fn serve(name: &str) -> Serving {
    let root = scratch().join("served").join(name);
    fs::create_dir_all(root.join("releases/download")).expect("making a server's root");
    fs::copy(repository().join("bootstrap/machine.sh"), root.join("machine")).expect("copying the bootstrap");
    Serving { root, certificate: "good" }
}

impl Serving {
    /// What it serves.
    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Publishes a release.
    #[must_use]
    pub fn release(self, release: &Release) -> Self {
        publish(&self.root, release);
        self
    }

    /// Lets a channel point to a version.
    #[must_use]
    pub fn channel(self, channel: &str, version: &str) -> Self {
        point(&self.root, channel, version);
        self
    }

    /// Serves the package source of `qualification/package-source`, as `/packages/`.
    #[must_use]
    pub fn packages(self) -> Self {
        let from = crate::lab::caches().join("packages/trixie");
        let to = self.root.join("packages");
        fs::create_dir_all(&to).expect("making the packages' directory");
        for entry in
            fs::read_dir(&from).expect("the package source; type: qualification/package-source").flatten()
        {
            if entry.file_name().to_string_lossy().starts_with('.') {
                continue;
            }
            fs::hard_link(entry.path(), to.join(entry.file_name())).expect("serving a package");
        }
        self
    }

    /// With a certificate that is wrong: `expired`, `wrong-name`, `unknown-issuer`.
    #[must_use]
    pub fn certificate(self, certificate: &'static str) -> Self {
        Self { certificate, ..self }
    }

    /// Starts it, at `https://releases.ployz.test` with a port of its own.
    pub fn start(self) -> Server {
        static PORT: AtomicU16 = AtomicU16::new(8443);
        let port = PORT.fetch_add(1, Ordering::Relaxed);
        let path = |name: &str| self.root.with_extension(name).display().to_string();
        let binary = binary();
        let listen = format!("10.77.0.1:{port}");
        let (root, log, control) = (self.root.display().to_string(), path("log"), path("control"));
        let certificate = ["--certificate", self.certificate];
        let words = ["lab", binary, &root, "--listen", &listen, "--log", &log, "--control", &control];
        let words = lab().words(&[&words[..], &certificate].concat());
        let mut child = Command::new(&words[0])
            .args(&words[1..])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .expect("starting the release server");
        let mut said = String::new();
        let stdout = child.stdout.take().expect("the server's standard output");
        BufReader::new(stdout).read_line(&mut said).expect("hearing the server");
        assert!(said.contains("serves"), "the release server does not start: see above");
        Server { child, root: self.root, port }
    }
}

impl Server {
    /// `https://releases.ployz.test:8443`
    pub fn url(&self) -> String {
        format!("https://releases.ployz.test:{}", self.port)
    }

    /// Publishes one more release.
    pub fn publish(&self, release: &Release) {
        publish(&self.root, release);
    }

    /// Lets a channel point to a version, from now on.
    pub fn point(&self, channel: &str, version: &str) {
        point(&self.root, channel, version);
    }

    /// Misbehaves by these rules from now on, see `qualification/release-server --help`.
    pub fn rules(&self, rules: &Value) {
        self.control(&["-X", "PUT", "--data", &rules.to_string(), "http://server/_rules"]).ok();
    }

    /// Sends the archive of any release so slowly that it does not end by itself.
    pub fn drip_archives(&self) {
        self.rules(&json!([{"path": "*.tar.gz", "drip": {"bytes": 1000, "every_ms": 100}}]));
    }

    /// Behaves well again.
    pub fn obey(&self) {
        self.rules(&json!([]));
    }

    /// The paths that were asked for since the last call of [`Server::forget`].
    pub fn asked(&self) -> Vec<String> {
        let records = self.control(&["http://server/_log"]).expect(0).events();
        records.iter().filter_map(|record| record["path"].as_str().map(str::to_owned)).collect()
    }

    /// Empties the log.
    pub fn forget(&self) {
        self.control(&["-X", "DELETE", "http://server/_log"]).ok();
    }

    /// Ends it: from now on its port is closed.
    pub fn stop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    fn control(&self, words: &[&str]) -> Run {
        let socket = self.root.with_extension("control").display().to_string();
        let mut all = vec!["curl", "-fsS", "-m", "10", "--unix-socket", &socket];
        all.extend(words);
        host(&all)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let log = fs::read_to_string(self.root.with_extension("log")).unwrap_or_default();
            let lines: Vec<&str> = log.lines().collect();
            eprintln!(
                "=== {}: what it was asked\n{}",
                self.url(),
                lines[lines.len().saturating_sub(20)..].join("\n")
            );
        }
        self.stop();
    }
}

fn publish(root: &Path, release: &Release) {
    let to = root.join("releases/download").join(format!("v{}", release.version));
    fs::create_dir_all(&to).expect("making a release's directory");
    for file in [release.archive(), release.checksums()] {
        fs::copy(&file, to.join(file.file_name().unwrap_or_default())).expect("publishing a release");
    }
}

fn point(root: &Path, channel: &str, version: &str) {
    let major = version.split('.').next().unwrap_or_default();
    let dir = root.join(format!("v{major}"));
    fs::create_dir_all(&dir).expect("making the pointers' directory");
    fs::write(dir.join(channel), format!("v{version}\n")).expect("writing a pointer");
}

/// The server's executable, built outside of the lab: inside there is no registry.
fn binary() -> &'static str {
    static BINARY: OnceLock<String> = OnceLock::new();
    BINARY.get_or_init(|| {
        let script = repository().join("qualification/release-server");
        let bound = std::time::Duration::from_secs(600);
        host_within(bound, &[script.as_os_str(), "--make-ca".as_ref()]).ok();
        let target =
            std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| repository().join("target"), PathBuf::from);
        target.join("debug/release-server").display().to_string()
    })
}
