//! A fresh host becomes a Machine: what `curl … | sh` leaves, and that it is still so after a reboot and a power loss.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failed assumption fails the test"
)]

use scenarios::{Image, Machine, Release, Server, release, serve};

#[test]
fn bootstrap_installs_a_machine_on_trixie() {
    bootstrap_installs_a_machine(Image::Trixie);
}

#[test]
fn bootstrap_installs_a_machine_on_bookworm() {
    bootstrap_installs_a_machine(Image::Bookworm);
}

fn bootstrap_installs_a_machine(image: Image) {
    let release = release("1.4.0");
    let name = format!("bootstrap-{image}");
    let server = serve(&name).release(&release).channel("stable", "1.4.0").start();
    let machine = Machine::named(&name).image(image).served_by(&server).boot();

    let run = machine.run(&bootstrap(&server, "--docker none --json")).expect(0);
    let record = run.record();
    let id = record["id"].as_str().unwrap().to_owned();

    it_runs_confined(&machine, &release);
    the_record_is_right(&machine, &record, &release);
    files_are_as_designed(&machine, &id);
    systemd_holds_it(&machine);
    machine.assert_nothing_left();
    the_journal_tells_the_story(&machine, &id);
    // The record that root prints is the record on disk.
    assert_eq!(machine.attempt(&id)["outcome"], record["outcome"]);

    machine.reboot();
    machine.assert_runs("1.4.0", &release.sha256);
    machine.lose_power();
    machine.assert_runs("1.4.0", &release.sha256);
    assert_eq!(machine.attempts(), [id]);
}

/// The line that an operator types, with the lab's server in the place of the published one.
fn bootstrap(server: &Server, options: &str) -> String {
    let url = server.url();
    format!(
        "curl -fsSL {url}/machine | PLOYZ_RELEASES={url}/releases/download PLOYZ_CHANNELS={url} sh -s -- {options}"
    )
}

fn it_runs_confined(machine: &Machine, release: &Release) {
    let daemon = machine.assert_runs("1.4.0", &release.sha256);
    let status = machine.read(&format!("/proc/{}/status", daemon.pid));
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap_or("?").trim();
    for set in ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"] {
        assert_eq!(field(set), "0000000000000000", "{set}\n{status}");
    }
    assert_eq!(field("NoNewPrivs:"), "1");
    let user = machine.run("id -u ployz").expect(0);
    let uids: Vec<&str> = field("Uid:").split_whitespace().collect();
    assert_eq!(uids, vec![user.text(); 4]);
    let allowed = machine.run("getent group ployz ployz-admission | cut -d: -f3 | sort -n").expect(0);
    let mut groups: Vec<u32> = field("Groups:").split_whitespace().map(|gid| gid.parse().unwrap()).collect();
    groups.sort_unstable();
    groups.dedup();
    let allowed: Vec<u32> = allowed.text().lines().map(|gid| gid.parse().unwrap()).collect();
    assert!(groups.iter().all(|gid| allowed.contains(gid)), "groups {groups:?}, and {allowed:?} are meant");
}

fn the_record_is_right(machine: &Machine, record: &serde_json::Value, release: &Release) {
    let outcome = &record["outcome"]["succeeded"];
    assert_eq!(outcome["version"], "1.4.0", "{record}");
    assert_eq!(outcome["sha256"], release.sha256.as_str(), "{record}");
    assert_eq!(outcome["pid"], machine.daemon().pid, "{record}");
    assert_eq!(outcome["nothing_was_needed"], false, "{record}");
    assert_eq!(record["target_digest"], release.sha256.as_str(), "{record}");
    assert_eq!(record["requested"]["channel"], "stable", "{record}");
    assert_eq!(record["installation"], "replaced", "{record}");
    assert!(record["ready_observed_at"].is_string(), "{record}");
    assert_eq!(record["from"], serde_json::Value::Null, "{record}");
    let current = machine.inventory()["current"].clone();
    assert_eq!(current["archive_sha256"], release.archive_sha256().as_str(), "{current}");
    assert_eq!(current["attempt"], record["id"], "{current}");
    assert_eq!(machine.inventory()["previous"], serde_json::Value::Null);
}

fn files_are_as_designed(machine: &Machine, id: &str) {
    let record = format!("/var/lib/ployz-install/attempts/{id}.json");
    machine.assert_modes(&[
        ("/usr/local/bin/ployzd", "file root:root 755"),
        ("/usr/local/lib/ployz", "directory root:root 755"),
        ("/usr/local/lib/ployz/installed.json", "file root:root 644"),
        ("/usr/local/lib/systemd/system", "directory root:root 755"),
        ("/usr/local/lib/systemd/system/ployz.service", "file root:root 644"),
        ("/usr/local/lib/systemd/system/ployz.socket", "file root:root 644"),
        ("/usr/local/lib/sysusers.d/ployz.conf", "file root:root 644"),
        ("/var/lib/ployz-install", "directory root:root 755"),
        ("/var/lib/ployz-install/admission.lock", "file root:ployz-admission 640"),
        ("/var/lib/ployz-install/attempts", "directory root:ployz 750"),
        (&record, "file root:ployz 640"),
        ("/var/lib/ployz", "directory ployz:ployz 750"),
        ("/run/ployz", "directory root:root 755"),
        ("/run/ployz/ployz.sock", "socket ployz:ployz 660"),
    ]);
    let members = machine.run("getent group ployz ployz-admission ployz-fetch ployz-deploy | cut -d: -f4");
    assert_eq!(members.text(), "", "these groups have no members yet");
    let previous = machine.run("ls /usr/local/bin").expect(0);
    assert_eq!(previous.text(), "ployzd");
}

fn systemd_holds_it(machine: &Machine) {
    let states = machine.run(
        "systemctl is-active ployz.service ployz.socket; systemctl is-enabled ployz.service ployz.socket
         systemctl --failed --no-legend --plain | grep ployz; systemd-analyze verify ployz.service ployz.socket 2>&1 |
         grep ployz; systemctl show -P NeedDaemonReload ployz.service",
    );
    assert_eq!(states.text(), "active\nactive\nenabled\nenabled\nno", "{}", states.shown());
}

fn the_journal_tells_the_story(machine: &Machine, id: &str) {
    let story = machine.run(&format!("journalctl --no-pager -o cat _UID=0 PLOYZ_ATTEMPT={id}")).expect(0);
    let stages = [
        "accepted",
        "acquiring",
        "verifying",
        "preflight",
        "activating",
        "restarting",
        "confirming",
        "succeeded",
    ];
    let _ = story.says(&stages);
    let staged = machine.run(&format!(
        "journalctl --no-pager -o cat _UID=0 PLOYZ_ATTEMPT={id} PLOYZ_STAGE=confirming; \
         journalctl --no-pager -o json _UID=0 PLOYZ_ATTEMPT={id} | grep -c MESSAGE_ID"
    ));
    assert!(staged.stdout.contains("1.4.0 is running"), "{}", staged.shown());
}
