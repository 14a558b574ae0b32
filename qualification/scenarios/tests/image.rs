//! `--installation-only`: a release is put into an image that is not running, and starts when that is booted.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failed assumption fails the test"
)]

use std::path::Path;
use std::time::Duration;

use scenarios::{Image, Machine, Plan, Release, Run, host, host_within, release};
use serde_json::Value;

const INSTALL: &str = "/root/release/ployzd install --version 1.4.0 --installation-only --json \
    --archive /root/release/ployzd_linux_amd64.tar.gz --checksums /root/release/checksums.txt";
/// What the installer connects to and starts, itself and its children.
const TRACE: &str = "strace -f -qq -e trace=connect,execve -o /root/trace";

/// Mounts what a machine will be made of, as its boot does, in a namespace of its own without any network.
const TREE: &str = r#"
    mount -t overlay overlay "$1/root" -o \
        "lowerdir=$(cat "$1/tree"),upperdir=$1/upper,workdir=$1/work,redirect_dir=on,index=off,metacopy=off"
    cd "$1/root"
    eval "$2"
    exec chroot . /bin/sh -c "$3""#;

/// Runs a command line in a machine that is not booted; `prepare` is run before it, in the tree's root.
fn in_tree(state: &Path, prepare: &str, command: &str) -> Run {
    let state = state.display().to_string();
    let unshare =
        ["unshare", "--mount", "--pid", "--net", "--fork", "--kill-child", "--propagation", "private"];
    let words: Vec<&str> =
        unshare.into_iter().chain(["sh", "-ec", TREE, "sh", &state, prepare, command]).collect();
    host_within(Duration::from_secs(60), &words)
}

/// A machine that is made and not booted, with a release in `/root/release`.
fn made(name: &str, image: Image, release: &Release) -> (Plan, std::path::PathBuf) {
    let plan = Machine::named(name).image(image);
    let state = plan.create();
    let to = state.join("upper/root/release").display().to_string();
    let from = release.dir.display().to_string();
    host(&["cp", "-r", &from, &to]).ok();
    (plan, state)
}

fn installed_without_contact(run: Run, state: &Path, release: &Release) {
    let run = run.expect(0);
    let record = run.record();
    assert_eq!(record["outcome"]["installed"]["version"], "1.4.0", "{record}");
    assert_eq!(record["outcome"]["installed"]["sha256"], release.sha256.as_str(), "{record}");
    assert_eq!(record["ready_observed_at"], Value::Null, "{record}");
    let trace = host(&["cat", &state.join("upper/root/trace").display().to_string()]).expect(0);
    no_contact(&trace.stdout);
    let links = in_tree(state, ":", "cd /etc/systemd/system && readlink *.wants/ployz.*").expect(0);
    let unit = |name: &str| format!("/usr/local/lib/systemd/system/ployz.{name}");
    assert_eq!(links.text(), format!("{}\n{}", unit("service"), unit("socket")));
    let digest = in_tree(state, ":", "sha256sum /usr/local/bin/ployzd").expect(0);
    assert!(digest.text().starts_with(&release.sha256), "{}", digest.shown());
}

/// Neither systemd nor D-Bus nor any other service is connected to, and systemctl isn't run. The C library of tools
/// tries its name service cache; our own log tries the journal.
fn no_contact(trace: &str) {
    assert!(trace.contains("execve("), "nothing was traced:\n{trace}");
    let contact = |line: &&str| {
        let harmless = ["/run/systemd/journal/socket", "/run/nscd/socket"];
        let connects = line.contains("connect(") && !harmless.iter().any(|path| line.contains(path));
        connects || (line.contains("execve(") && (line.contains("systemctl") || line.contains("systemd-run")))
    };
    let contacts: Vec<&str> = trace.lines().filter(contact).collect();
    assert!(contacts.is_empty(), "it was in contact:\n{}", contacts.join("\n"));
}

/// Booted, the tree becomes a Machine that is ready by itself, and that `install` then has nothing to do for.
fn it_becomes_a_machine(plan: Plan, release: &Release) {
    let machine = plan.start();
    machine.until("it is ready", |machine| machine.run("systemctl is-active ployz.service").code == 0);
    let (api, daemon) = (machine.api(), machine.daemon());
    assert_eq!((&api["version"], &api["ready"]), (&"1.4.0".into(), &true.into()), "{api}");
    assert!(daemon.runs_installed && daemon.sha256 == release.sha256, "{daemon:?}");
    machine.assert_modes(&[
        ("/var/lib/ployz", "directory ployz:ployz 750"),
        ("/var/lib/ployz-install", "directory root:root 755"),
        ("/var/lib/ployz-install/admission.lock", "file root:ployz-admission 640"),
        ("/var/lib/ployz-install/attempts", "directory root:ployz 750"),
        ("/run/ployz/ployz.sock", "socket ployz:ployz 660"),
    ]);
    machine.assert_nothing_left();
    let run = machine.run("/usr/local/bin/ployzd install --docker none --json").expect(0);
    assert_eq!(run.outcome()["succeeded"]["nothing_was_needed"], true);
    assert_eq!(machine.assert_runs("1.4.0", &release.sha256).pid, daemon.pid);
}

#[test]
fn installation_only_in_an_image_contacts_nothing_and_boots_ready_on_trixie() {
    installation_only_in_an_image("image-trixie", Image::Trixie, "mount -t proc proc proc");
}

#[test]
fn installation_only_in_an_image_contacts_nothing_and_boots_ready_on_bookworm() {
    installation_only_in_an_image("image-bookworm", Image::Bookworm, "mount -t proc proc proc");
}

#[test]
fn installation_only_needs_neither_dev_nor_run() {
    let prepare = "mount -t proc proc proc; rm -rf dev run; ls";
    let state = installation_only_in_an_image("image-bare", Image::Trixie, prepare);
    assert!(!state.exists(), "the machine is destroyed");
}

fn installation_only_in_an_image(name: &str, image: Image, prepare: &str) -> std::path::PathBuf {
    let release = release("1.4.0");
    let (plan, state) = made(name, image, &release);
    let refused = in_tree(&state, ":", INSTALL);
    assert_eq!(refused.code, 4, "{}", refused.shown());
    let _ = refused.says(&["/proc is not mounted", "mount -t proc"]);

    let prepare = format!("{{ {prepare}; }} >/dev/null");
    let run = in_tree(&state, &prepare, &format!("{TRACE} {INSTALL}"));
    installed_without_contact(run, &state, &release);
    let again = in_tree(&state, &prepare, INSTALL).expect(0);
    assert_eq!(again.record()["installation"], "unchanged");
    // Nspawn needs them again.
    let _ = in_tree(&state, "mkdir -p dev run", "true");
    it_becomes_a_machine(plan, &release);
    state
}

#[test]
fn installation_only_on_a_running_system_starts_nothing() {
    let release = release("1.4.0");
    let machine = Machine::named("image-running").boot();
    let from = machine.deliver(&release);
    let ployzd = format!("/root/1.4.0-{}/ployzd", &release.sha256[..8]);
    let run = machine.run(&format!("{TRACE} {ployzd} install {from} --installation-only --json")).expect(0);
    assert_eq!(run.outcome()["installed"]["version"], "1.4.0");
    no_contact(&machine.read("/root/trace"));
    let state = machine.run("systemctl is-active ployz.service ployz.socket; ls /run/ployz").both();
    assert!(state.starts_with("inactive\ninactive\n"), "{state}");

    let run = machine.run("/usr/local/bin/ployzd install --docker none --json").expect(0);
    assert_eq!(run.outcome()["succeeded"]["nothing_was_needed"], false);
    machine.assert_runs("1.4.0", &release.sha256);
}
