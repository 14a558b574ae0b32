//! The binary: its line, its rules file, its control socket, its end.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod common;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

const PROGRAM: &str = env!("CARGO_BIN_EXE_release-server");

/// A running binary, ended when dropped.
struct Running {
    child: Child,
    line: String,
}

impl Running {
    fn start(site: &Path, state: &Path, arguments: &[&str]) -> Self {
        let mut child = Command::new(PROGRAM)
            .arg(site)
            .args(["--listen", "127.0.0.1:0", "--state"])
            .arg(state)
            .args(arguments)
            .current_dir(state)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        Self { child, line }
    }

    fn url(&self) -> &str {
        self.line.split(' ').nth(1).unwrap()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The status of a path, and what was sent.
fn curl(state: &Path, arguments: &[&str]) -> String {
    let output = Command::new("curl")
        .args(["-sS", "--max-time", "10", "--noproxy", "*", "--cacert", "ca/ca.pem", "-w", "%{http_code}"])
        .args(arguments)
        .current_dir(state)
        .output()
        .unwrap();
    String::from_utf8([output.stdout, output.stderr].concat()).unwrap()
}

fn soon(what: &str, mut check: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(5);
    while !check() {
        assert!(Instant::now() < end, "{what} did not happen");
        sleep(Duration::from_millis(20));
    }
}

#[test]
fn serves_obeys_its_rules_file_and_ends() {
    let (site, state) = (common::site(), tempfile::tempdir().unwrap());
    let state = state.path();
    let mut running = Running::start(site.path(), state, &["--rules", "rules.json", "--log", "log"]);
    let url = format!("{}/v1/stable", running.url());
    let ca = state.join("ca/ca.pem");
    let said = format!(
        "release-server: {} serves {} (ca: {})\n",
        running.url(),
        site.path().display(),
        ca.display()
    );
    assert_eq!(running.line, said);
    assert_eq!(curl(state, &[&url]), "v1.4.0\n200");

    fs::write(state.join("rules.json"), r#"[{"path":"/v1/*","status":418,"body":"no"}]"#).unwrap();
    soon("the rule", || curl(state, &[&url]) == "no418");
    fs::write(state.join("rules.json"), r#"[{"path":"/v1/*","sta"#).unwrap();
    sleep(Duration::from_millis(300));
    assert_eq!(curl(state, &[&url]), "no418", "what can't be read changes nothing");
    fs::remove_file(state.join("rules.json")).unwrap();
    soon("the end of the rule", || curl(state, &[&url]) == "v1.4.0\n200");

    let log = fs::read_to_string(state.join("log")).unwrap();
    let first: serde_json::Value = serde_json::from_str(log.lines().next().unwrap()).unwrap();
    assert_eq!((first["path"].as_str(), first["status"].as_u64()), (Some("/v1/stable"), Some(200)));
    assert_eq!((first["sent"].as_u64(), first["rule"].is_null()), (Some(7), true));

    let pid = running.child.id().to_string();
    assert!(Command::new("kill").arg(pid).status().unwrap().success());
    assert_eq!(running.child.wait().unwrap().code(), Some(0));
}

#[test]
fn obeys_its_control_socket() {
    let (site, state) = (common::site(), tempfile::tempdir().unwrap());
    let state = state.path();
    drop(std::os::unix::net::UnixListener::bind(state.join("control")).unwrap());
    let running = Running::start(site.path(), state, &["--control", "control"]);
    let url = format!("{}/v1/stable", running.url());
    let control = |arguments: &[&str]| curl(state, &[&["--unix-socket", "control"], arguments].concat());
    let put = ["-X", "PUT", "--data", r#"[{"path":"*","status":503,"times":1}]"#, "http://server/_rules"];
    assert_eq!(control(&put), "rules: 1\n200");
    assert!(curl(state, &[&url]).ends_with("503"));
    assert_eq!(curl(state, &[&url]), "v1.4.0\n200");
    assert!(control(&["http://server/_rules"]).contains(r#""applied": 1"#));
    let post = ["--data", r#"{"path":"*","status":404}"#, "http://server/_rules"];
    assert_eq!(control(&post), "rules: 2\n200");
    assert!(curl(state, &[&url]).ends_with("404"));
    assert_eq!(control(&["-X", "DELETE", "http://server/_rules"]), "rules: 0\n200");
    assert!(control(&["-X", "PUT", "--data", "[{}", "http://server/_rules"]).ends_with("400"));
    assert_eq!(control(&["http://server/_log"]).matches(r#""path":"/v1/stable""#).count(), 3);
    assert!(control(&["-X", "DELETE", "http://server/_log"]).ends_with("200"));
    assert_eq!(control(&["http://server/_log"]), "200");
    assert!(control(&["http://server/other"]).ends_with("404"));
}

#[test]
fn keeps_its_authority() {
    let (site, state) = (common::site(), tempfile::tempdir().unwrap());
    let made = Command::new(PROGRAM).args(["--make-ca", "--state"]).arg(state.path()).output().unwrap();
    let path = state.path().join("ca/ca.pem");
    assert_eq!(String::from_utf8(made.stdout).unwrap(), format!("{}\n", path.display()));
    let pem = fs::read(&path).unwrap();
    for kind in ["good", "expired", "wrong-name", "unknown-issuer", "not-yet-valid"] {
        let running = Running::start(site.path(), state.path(), &["--certificate", kind]);
        let answer = curl(state.path(), &[running.url()]);
        assert_eq!(answer.contains("curl: (60)"), kind != "good", "{kind}: {answer}");
        assert_eq!(fs::read(&path).unwrap(), pem);
    }
}

#[test]
fn says_why_it_does_not_start() {
    let site = common::site();
    for (arguments, code, words) in [
        (
            vec!["--plain", "--listen", "0.0.0.0:0"],
            4,
            "refusing to listen on 0.0.0.0:0: neither loopback nor lab",
        ),
        (vec!["--plain", "--listen", "nowhere"], 2, "invalid value 'nowhere'"),
        (vec!["--plain", "--listen", "127.0.0.1:0", "--rules", "/proc/version"], 4, "reading /proc/version"),
        (vec!["--plain", "--certificate", "expired"], 2, "cannot be used with"),
    ] {
        let output = Command::new(PROGRAM).arg(site.path()).args(&arguments).output().unwrap();
        let says = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(code) && says.contains(words), "{arguments:?}: {says}");
    }
}
