//! Rung 2: the shape of the command lines: what they say of themselves, how they refuse, how they end.
//!
//! Nothing here installs: `install` is only ever run by an ordinary user. `PLOYZ_BLESS=1` writes the golden files anew.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::fs::{self, File};
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::{PoisonError, RwLock};

use serde_json::{Value, json};

const PLOYZD: &str = env!("CARGO_BIN_EXE_ployzd");
const PLOYZ: &str = env!("CARGO_BIN_EXE_ployz");
const VERSION: &str = env!("CARGO_PKG_VERSION");
const NOBODY: u32 = 65534;

/// Whoever writes an executable holds this for writing, whoever starts a process for reading: a child would inherit
/// the open file until it execs, and the executable would be "busy".
static STARTING: RwLock<()> = RwLock::new(());

/// A command without a terminal and with an environment that changes nothing.
fn command(program: impl AsRef<Path>, arguments: &[&str]) -> Command {
    let mut command = Command::new(program.as_ref());
    command.args(arguments).env_clear().env("PATH", "/usr/bin:/bin").stdin(Stdio::null());
    command.stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn end(mut command: Command) -> Output {
    let started = STARTING.read().unwrap_or_else(PoisonError::into_inner);
    let child = command.spawn().unwrap();
    drop(started);
    child.wait_with_output().unwrap()
}

fn ployzd(arguments: &[&str]) -> Output {
    end(command(PLOYZD, arguments))
}

/// The same as an ordinary user, whoever runs the tests.
fn as_ordinary_user(arguments: &[&str]) -> Output {
    if !nix::unistd::Uid::effective().is_root() {
        return ployzd(arguments);
    }
    let directory = tempfile::tempdir().unwrap();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let copy = directory.path().join("ployzd");
    let writing = STARTING.write().unwrap_or_else(PoisonError::into_inner);
    fs::copy(PLOYZD, &copy).unwrap();
    drop(writing);
    let mut command = command(&copy, arguments);
    command.uid(NOBODY).gid(NOBODY).current_dir("/");
    end(command)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// Status, standard output, standard error. Nobody ever sees a panic.
fn shown(output: &Output) -> (i32, String, String) {
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    let code = output.status.code().unwrap_or_else(|| panic!("{:?}: {err}", output.status));
    assert!(!err.contains("panicked") && code != 101, "{err}");
    (code, out, err)
}

/// Every command line that has a help, and the golden file's name.
const HELP: &[(&str, &[&str])] = &[
    ("ployzd", &[]),
    ("ployzd-install", &["install"]),
    ("ployzd-status", &["status"]),
    ("ployzd-machine", &["machine"]),
    ("ployzd-machine-initialize", &["machine", "initialize"]),
    ("ployzd-machine-reset", &["machine", "reset"]),
    ("ployzd-version", &["version"]),
    ("ployzd-units", &["units"]),
    ("ployzd-daemon", &["daemon"]),
    ("ployzd-volume-plugin", &["volume-plugin"]),
    ("ployzd-fetch", &["fetch"]),
    ("ployzd-upgrade", &["upgrade"]),
    ("ployzd-recover", &["recover"]),
    ("ployzd-doctor", &["doctor"]),
    ("ployzd-uninstall", &["uninstall"]),
    ("ployzd-attempt", &["attempt"]),
    ("ployzd-service", &["service"]),
    ("ployzd-service-deploy", &["service", "deploy"]),
    ("ployzd-service-list", &["service", "list"]),
    ("ployzd-service-remove", &["service", "remove"]),
    ("ployzd-deploy-worker", &["deploy-worker"]),
    ("ployzd-deploy-ended", &["deploy-ended"]),
    ("ployzd-upgrade-worker", &["upgrade-worker"]),
    ("ployzd-upgrade-ended", &["upgrade-ended"]),
    ("ployzd-confine", &["confine"]),
];

#[test]
fn help_is_golden() {
    let bless = std::env::var_os("PLOYZ_BLESS").is_some();
    let mut names = Vec::new();
    for (name, program, verb) in
        HELP.iter().map(|(name, verb)| (*name, PLOYZD, *verb)).chain([("ployz", PLOYZ, &[][..])])
    {
        let (code, out, err) = shown(&end(command(program, &[verb, &["--help"]].concat())));
        assert_eq!((code, err.as_str()), (0, ""), "{name}");
        assert!(!out.contains('\u{1b}') && out.lines().all(|line| line.len() <= 100), "{name}");
        let path = Path::new("tests/golden").join(format!("{name}.txt"));
        if bless {
            fs::write(&path, &out).unwrap();
        }
        let golden = fs::read_to_string(&path).unwrap_or_default();
        assert_eq!(out, golden, "{path:?}; if it is meant, run again with PLOYZ_BLESS=1");
        names.push(path);
    }
    let mut found: Vec<PathBuf> =
        fs::read_dir("tests/golden").unwrap().map(|entry| entry.unwrap().path()).collect();
    found.sort();
    names.sort();
    assert_eq!(found, names, "each golden file has its command line");
}

#[test]
fn every_verb_that_is_listed_has_a_golden_help() {
    for above in [&[][..], &["machine"], &["service"]] {
        let (_, out, _) = shown(&ployzd(&[above, &["--help"]].concat()));
        let listed =
            out.lines().skip_while(|line| *line != "Commands:").skip(1).take_while(|line| !line.is_empty());
        let verbs: Vec<_> = listed.filter_map(|line| line.split_whitespace().next()).collect();
        assert!(!verbs.is_empty());
        for verb in verbs {
            let known = HELP.iter().any(|(_, path)| *path == [above, &[verb]].concat());
            assert!(known, "{above:?} {verb}");
        }
    }
}

#[test]
fn what_is_not_understood_is_a_usage_error() {
    for arguments in [
        &[][..],
        &["instal"],
        &["upgrade-everything"],
        &["--version"],
        &["install", "extra"],
        &["install", "--verison", "1.4.0"],
        &["install", "--version"],
        &["install", "--version", "latest"],
        &["install", "--version", "v1.4.0"],
        &["install", "--version", "1.4"],
        &["install", "--version", "1.4.0/../../x"],
        &["install", "--channel", "nightly"],
        &["install", "--archive", "x.tar.gz"],
        &["install", "--checksums", "checksums.txt"],
        &["install", "--archive", "x", "--checksums", "y"],
        &["install", "--software-only", "--installation-only"],
        &["install", "--docker", "podman"],
        &["install", "--installation-only", "--group-user", "x"],
        &["status", "now"],
        &["machine"],
        &["machine", "restart"],
        &["machine", "initialize", "--name"],
        &["units", "--yaml"],
        &["daemon", "--listen", "0.0.0.0:80"],
        &["confine"],
        &["confine", "--"],
    ] {
        let (code, out, err) = shown(&as_ordinary_user(arguments));
        assert_eq!((code, out.as_str()), (2, ""), "{arguments:?}: {err}");
        assert!(err.contains("--help"), "{arguments:?}: {err}");
    }
    // Whoever reads JSON reads an outcome.
    let (code, out, _) = shown(&as_ordinary_user(&["install", "--json", "--version", "latest"]));
    let last: Value = serde_json::from_str(out.trim()).unwrap();
    assert_eq!((code, &last["event"], &last["refused"]["reason"]), (2, &json!("outcome"), &json!("usage")));
    for arguments in [&[][..], &["machine"], &["--verison"]] {
        let (code, out, err) = shown(&end(command(PLOYZ, arguments)));
        assert_eq!((code, out.as_str(), err.is_empty()), (2, "", false), "{arguments:?}");
    }
}

#[test]
fn install_needs_root_and_says_so() {
    for arguments in
        [&["install"][..], &["install", "--version", "1.4.0"], &["install", "--installation-only"]]
    {
        let (code, out, err) = shown(&as_ordinary_user(arguments));
        assert_eq!((code, out.as_str()), (77, ""), "{err}");
        assert!(
            err.contains("nothing was changed") && err.contains("sudo /"),
            "an absolute path to type: {err}"
        );
    }
    let (code, out, _) = shown(&as_ordinary_user(&["install", "--json"]));
    let last: Value = serde_json::from_str(out.lines().last().unwrap_or_default()).unwrap_or_default();
    assert_eq!(code, 77);
    assert_eq!(
        (&last["event"], &last["refused"]["reason"]),
        (&json!("outcome"), &json!("not_permitted")),
        "{out:?}"
    );
}

#[test]
fn version_and_units_are_for_programs_too() {
    let (code, out, err) = shown(&ployzd(&["version", "--json"]));
    assert_eq!((code, err.as_str(), out.lines().count()), (0, "", 1));
    let about: Value = serde_json::from_str(&out).unwrap();
    let target = format!("{}-linux", std::env::consts::ARCH);
    assert_eq!(about, json!({"version": VERSION, "target": target, "requires": {"systemd": 252}}));
    assert_eq!(shown(&ployzd(&["version"])), (0, format!("ployzd {VERSION}\n"), String::new()));
    for flag in ["--version", "-V"] {
        assert_eq!(shown(&end(command(PLOYZ, &[flag]))), (0, format!("ployz {VERSION}\n"), String::new()));
    }
}

#[test]
fn units_are_the_files_in_hardening() {
    let (code, out, _) = shown(&ployzd(&["units", "--json"]));
    let units: Vec<Value> = serde_json::from_str(&out).unwrap();
    assert_eq!(code, 0);
    let kind =
        |name: &str| Path::new(name).extension().and_then(|e| e.to_str()).unwrap_or_default().to_owned();
    let mut names = Vec::new();
    for unit in &units {
        let name = unit["name"].as_str().unwrap();
        assert_eq!(unit["content"], fs::read_to_string(Path::new("hardening").join(name)).unwrap(), "{name}");
        assert!(unit["enable"].is_boolean() && unit["start"].is_boolean(), "{name}");
        names.push(name.to_owned());
    }
    let first_service = names.iter().position(|name| kind(name) == "service").unwrap();
    let last_socket = names.iter().rposition(|name| kind(name) == "socket").unwrap();
    assert!(last_socket < first_service, "sockets come before the services that they start: {names:?}");
    let files =
        fs::read_dir("hardening").unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut files: Vec<_> =
        files.filter(|name| ["service", "socket"].contains(&kind(name).as_str())).collect();
    files.sort();
    names.sort();
    assert_eq!(names, files);
    let (_, out, _) = shown(&ployzd(&["units"]));
    for unit in &units {
        assert!(out.contains(unit["content"].as_str().unwrap()));
    }
}

#[test]
fn status_where_nothing_is_installed() {
    let there = |path: &str| Path::new(path).exists();
    if there("/usr/local/bin/ployzd") || there("/usr/local/lib/ployz/installed.json") {
        return;
    }
    let before = there("/var/lib/ployz-install");
    for arguments in [&["status"][..], &["status", "--json"]] {
        for output in [ployzd(arguments), as_ordinary_user(arguments)] {
            let (code, out, err) = shown(&output);
            assert_eq!((code, err.as_str()), (4, ""), "{out}");
            assert!(out.contains("nothing is installed"), "{out}");
            if arguments.contains(&"--json") {
                let status: Value = serde_json::from_str(&out).unwrap();
                assert_eq!((&status["schema"], out.lines().count()), (&json!(1), 1));
            }
        }
    }
    assert_eq!(there("/var/lib/ployz-install"), before, "looking makes nothing");
}

#[test]
fn output_that_can_not_be_written_is_not_a_success() {
    for arguments in [
        &["--help"][..],
        &["install", "--help"],
        &["version"],
        &["version", "--json"],
        &["units"],
        &["units", "--json"],
        &["status"],
        &["status", "--json"],
    ] {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let (reader, pipe) = std::io::pipe().unwrap();
        drop(reader);
        for (name, stdout) in [("full", Stdio::from(full)), ("pipe", Stdio::from(pipe))] {
            let mut command = command(PLOYZD, arguments);
            command.stdout(stdout);
            let (code, _, err) = shown(&end(command));
            assert_eq!(code, 6, "{arguments:?} into {name}: {err}");
        }
        let line = "exec \"$0\" \"$@\" >&-";
        let (_, _, err) = shown(&end(command("/bin/sh", &[&["-c", line, PLOYZD], arguments].concat())));
        assert_eq!(err, "", "{arguments:?}");
    }
}

#[test]
fn errors_that_nobody_reads_keep_their_status() {
    for (arguments, expected) in [(&["instal"][..], 2), (&["install"], 77), (&["daemon"], 78)] {
        if arguments == ["install"] && nix::unistd::Uid::effective().is_root() {
            continue;
        }
        let (reader, pipe) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = command(PLOYZD, arguments);
        command.stderr(pipe);
        assert_eq!(shown(&end(command)).0, expected, "{arguments:?}");
    }
}

#[test]
fn what_needs_a_daemon_or_a_socket_says_where_to_look() {
    let (code, out, err) = shown(&ployzd(&["daemon"]));
    assert_eq!((code, out.as_str()), (78, ""), "starting it again would change nothing");
    assert!(
        err.contains("no listening socket from systemd") && err.contains("systemctl start ployz.socket"),
        "{err}"
    );
    let (code, _, err) = shown(&ployzd(&["machine", "reset"]));
    assert_eq!(code, 4, "nobody confirmed it");
    assert!(err.contains("nothing was changed") && err.contains("--yes"), "{err}");
    if !Path::new("/run/ployz/ployz.sock").exists() {
        for arguments in [&["machine", "initialize"][..], &["machine", "reset", "--yes"]] {
            let (code, _, err) = shown(&ployzd(arguments));
            assert_eq!(code, 4, "{err}");
            assert!(
                err.contains("/run/ployz/ployz.sock") && err.contains("systemctl status ployz.socket"),
                "{err}"
            );
        }
    }
}

#[test]
fn the_fetch_child_refuses_what_is_no_order() {
    let order = |url: &str, ca: Value| {
        let bounds =
            json!({"proxy": null, "allow_http": false, "most": 10, "deadline_ms": 400, "stall_ms": 300});
        let mut order = json!({"url": url, "ca": ca});
        order.as_object_mut().unwrap().extend(bounds.as_object().unwrap().clone());
        order.to_string()
    };
    for (input, kind, says) in [
        (String::new(), "here", "reading the order"),
        ("{}".into(), "here", "missing field `url`"),
        ("GET / HTTP/1.1\r\n".into(), "here", "reading the order"),
        ("x".repeat(3 << 20), "here", "reading the order"),
        (order("file:///etc/passwd", Value::Null), "", "file:///etc/passwd"),
        (order("http://127.0.0.1:9/", Value::Null), "", "http://127.0.0.1:9/"),
        (order("nonsense", Value::Null), "", "nonsense"),
        (order("https://127.0.0.1:9/", json!("")), "refused", "ca_file holds no certificate"),
    ] {
        let mut command = command(PLOYZD, &["fetch"]);
        command.stdin(Stdio::piped());
        let started = STARTING.read().unwrap_or_else(PoisonError::into_inner);
        let mut child = command.spawn().unwrap();
        drop(started);
        let _ = child.stdin.take().unwrap().write_all(input.as_bytes());
        let (code, out, err) = shown(&child.wait_with_output().unwrap());
        assert_eq!((code, out.as_str()), (1, ""), "{err}");
        let said: Value =
            serde_json::from_str(err.lines().last().unwrap()).unwrap_or_else(|_| panic!("{err}"));
        assert!(kind.is_empty() || said["kind"] == kind, "{err}");
        assert!(err.contains(says), "{err}");
    }
}

#[test]
fn confine_takes_everything_away() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    // The write is in a shell of its own, which is killed for it.
    let line = format!("(echo x >'{}') 2>/dev/null; ", file.display())
        + "echo \"wrote: $?\"; ulimit -f; ulimit -c; env; while read -r key value; do \
           case $key in Cap[EIPA]*:|NoNewPrivs:) echo \"$key $value\";; esac; done </proc/self/status";
    let mut confined = command(PLOYZD, &["confine", "--", "/bin/sh", "-c", &line]);
    confined.env("SECRET", "x").env("LD_PRELOAD", "");
    let (code, out, err) = shown(&end(confined));
    assert_eq!(code, 0, "{out}{err}");
    assert!(!out.contains("SECRET") && !out.contains("LD_PRELOAD"), "{out}");
    let lines: Vec<_> =
        out.lines().filter(|line| !line.starts_with("PWD=") && !line.starts_with("_=")).collect();
    assert!(lines[0] != "wrote: 0", "{out}");
    assert_eq!(lines[1..3], ["0", "0"], "no byte into a file, no core: {out}");
    let none = "0000000000000000";
    let capabilities = ["CapInh", "CapPrm", "CapEff", "CapAmb"].map(|set| format!("{set}: {none}"));
    for expected in capabilities.iter().map(String::as_str).chain(["NoNewPrivs: 1"]) {
        assert!(lines.contains(&expected), "{expected}: {out}");
    }
    assert_eq!(fs::metadata(&file).map(|meta| meta.len()).unwrap_or_default(), 0);

    // What a shell had open when it started the installer is not for whoever it does not trust.
    let line = format!("exec 7<Cargo.toml 8>&1; exec {PLOYZD} confine -- /bin/ls /proc/self/fd");
    let (code, out, err) = shown(&end(command("/bin/sh", &["-c", &line])));
    assert_eq!(code, 0, "{out}{err}");
    assert_eq!(
        out.split_whitespace().collect::<Vec<_>>(),
        ["0", "1", "2", "3"],
        "the last is that of the list"
    );

    let (code, _, err) = shown(&ployzd(&["confine", "--", "/nonexistent/program"]));
    assert_eq!(code, 126, "{err}");
    assert!(err.contains("/nonexistent/program"), "{err}");
}
