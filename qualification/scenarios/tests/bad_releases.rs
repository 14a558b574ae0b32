//! A release that is broken in every way a release can be is reported for what it is; the last confirmed one is kept, a
//! person puts it back, and the container serves all along.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failed assumption fails the test"
)]

use std::time::{Duration, Instant};

use scenarios::{Image, Machine, Server, note, release, release_variant, serve};
use serde_json::json;

const PLOYZD: &str = "/usr/local/bin/ployzd";
const RECOVER: &str = "/usr/local/bin/ployzd.previous recover --yes";

/// A machine with 1.4.0, then 1.5.0, both confirmed, and 1.5.0 running.
fn prepared(name: &str, image: Image) -> (Server, Machine) {
    let (old, good) = (release("1.4.0"), release("1.5.0"));
    let server = serve(name).release(&old).release(&good).start();
    // Long enough to see what comes five seconds later, short enough for what never comes.
    let deadlines = json!({"confirm": 12, "preflight": 3});
    let machine = Machine::named(name).image(image).served_by(&server);
    let machine =
        machine.setting("deadlines", deadlines).setting("confirm_window", json!(7)).installed("1.4.0").boot();
    let id = machine.ask_for("1.5.0");
    machine.assert_upgraded(&id, &good);
    (server, machine)
}

/// How a release is broken, at which stage it is failed and why, what is said, and whether it is in place then.
const BROKEN: [(&str, &str, &str, &str, bool); 10] = [
    ("exits-42", "confirming", "crashed", "exited with status 42", true),
    ("never-ready", "confirming", "not_ready", "not ready within 12 s: ployz.service is activating", true),
    ("crashes-later", "confirming", "unstable", "was killed by signal 6", true),
    ("wrong-version", "confirming", "wrong_version", "9.9.9 answers, not 1.6.0", true),
    ("never-answers", "confirming", "not_ready", "did not answer", true),
    (
        "lost-plugin",
        "confirming",
        "crashed|not_ready",
        "ployz-volume-plugin.service exited with status 3",
        true,
    ),
    ("bad-unit", "preflight", "units", "ployz.service", false),
    ("needs-group", "preflight", "accounts", "group ployz-elsewhere", false),
    ("preflight-hangs", "preflight", "hangs", "did not end within 3 s", false),
    ("preflight-floods", "preflight", "does_not_run", "wrote more than", false),
];

#[test]
fn whatever_is_broken_is_named_the_confirmed_release_is_kept_and_a_person_puts_it_back() {
    let (server, machine) = prepared("bad", Image::TrixieDocker);
    let good = release("1.5.0");
    machine.start_docker();
    machine.run(&format!("{PLOYZD} install --docker auto")).ok();
    machine.run(&format!("{PLOYZD} service deploy web --image web:1")).ok();
    machine.run(&format!("{PLOYZD} machine initialize --name bad")).ok();
    let identity = machine.api()["id"].clone();
    let container =
        machine.run("docker inspect -f '{{.Id}} {{.State.StartedAt}}' ployz-web").text().to_owned();
    let traffic = machine.traffic("ployz-web");
    let mut table = Vec::new();
    for (variant, stage, reason, words, replaced) in BROKEN {
        let bad = release_variant("1.6.0", variant);
        server.publish(&bad);
        // As an operator asks: by the daemon and its worker.
        let run = machine.run_within(120, &format!("{PLOYZD} upgrade --version 1.6.0 --json"));
        let record = run.last()["record"].clone();
        assert_eq!(run.code, if replaced { 5 } else { 4 }, "{variant}: {}", run.shown());
        let failed = &record["outcome"]["failed"];
        assert_eq!(failed["stage"], stage, "{variant}: {record}");
        assert!(reason.split('|').any(|reason| failed["reason"] == reason), "{variant}: {record}");
        let all = failed.to_string();
        assert!(all.contains(words), "{variant}: {all}");
        assert_eq!(
            record["installation"],
            if replaced { "replaced" } else { "unchanged" },
            "{variant}: {record}"
        );
        let in_place = machine.sha256(PLOYZD);
        assert_eq!(in_place == bad.sha256, replaced, "{variant}");
        let error: String = failed["error"].as_str().unwrap_or_default().chars().take(110).collect();
        table
            .push(format!("{variant:<16} {stage} {} {error}", failed["reason"].as_str().unwrap_or_default()));
        machine.assert_nothing_left();
        if !replaced {
            machine.assert_runs("1.5.0", &good.sha256);
            continue;
        }
        // Nothing comes back by itself; the last confirmed release is kept.
        assert_eq!(machine.sha256("/usr/local/bin/ployzd.previous"), good.sha256, "{variant}");
        assert!(all.contains("ployzd.previous recover"), "{variant}: {all}");
        let run = machine.run_within(60, &format!("{RECOVER} --json")).expect(0);
        let record = run.record();
        assert_eq!((&record["kind"], &record["target"]), (&"recover".into(), &"1.5.0".into()), "{record}");
        machine.assert_runs("1.5.0", &good.sha256);
        assert_eq!(machine.inventory()["current"]["confirmed"], true, "{variant}");
        assert_eq!(
            machine.sha256("/usr/local/bin/ployzd.previous"),
            good.sha256,
            "{variant}: a bad one is never kept"
        );
        assert_eq!(machine.api()["id"], identity, "{variant}");
        machine.assert_nothing_left();
        machine.assert_healthy();
    }
    // Processes that a release leaves behind before it is trusted are ended, and it is none the worse for it.
    let forks = release_variant("1.6.0", "preflight-forks");
    server.publish(&forks);
    let id = machine.ask_for("1.6.0");
    machine.assert_upgraded(&id, &forks);
    assert_eq!(machine.run("pgrep -f '[l]inger' | wc -l").text(), "0", "a process of a preflight is left");
    let served = machine.served(&traffic);
    note(&format!("bad releases:\n  {}\n  {served:?}", table.join("\n  ")));
    assert!(served.asked > 100 && served.failed == 0, "{served:?}");
    assert_eq!(machine.run("docker inspect -f '{{.Id}} {{.State.StartedAt}}' ployz-web").text(), container);
}

#[test]
fn two_bad_releases_in_a_row_push_no_good_one_out_and_polled_for_a_minute_the_api_comes_back() {
    let (server, machine) = prepared("bad-twice", Image::Trixie);
    let good = release("1.5.0");
    for variant in ["crashes-later", "exits-42"] {
        server.publish(&release_variant("1.6.0", variant));
        let run = machine.run_within(120, &format!("{PLOYZD} install --version 1.6.0 --docker none"));
        assert_eq!(run.code, 5, "{variant}: {}", run.shown());
        assert_eq!(machine.sha256("/usr/local/bin/ployzd.previous"), good.sha256, "after {variant}");
    }
    // For a minute clients poll an API whose daemon exits with 42.
    let poll = "for i in 1 2 3 4; do (end=$(($(date +%s) + 60)); while [ $(date +%s) -lt $end ]; do \
        curl -s -m 1 -o /dev/null --unix-socket /run/ployz/ployz.sock http://m/v1/machine; done) & done; wait";
    let started = Instant::now();
    machine.run_within(100, poll).ok();
    assert!(started.elapsed() > Duration::from_secs(55));
    let state = machine.run("systemctl is-active ployz.socket").text().to_owned();
    note(&format!("after a minute the socket is {state}; {} restarts", machine.daemon().restarts));
    let shown = machine.run(&format!("{PLOYZD} status")).expect(4);
    let _ = shown.says(&["1.6.0", "never confirmed", "previous    1.5.0", "ployzd.previous recover"]);
    let run = machine.run(RECOVER).expect(0);
    let _ = run.says(&[
        "This puts a release back",
        "1.5.0",
        "never confirmed",
        "older software may not understand",
    ]);
    machine.assert_runs("1.5.0", &good.sha256);
    machine.assert_healthy();
    // One that had been confirmed is kept when a person goes back from it.
    let confirmed = release("1.6.0");
    server.publish(&confirmed);
    let id = machine.ask_for("1.6.0");
    machine.assert_upgraded(&id, &confirmed);
    machine.run(&format!("{PLOYZD} recover --yes")).ok();
    machine.assert_runs("1.5.0", &good.sha256);
    assert_eq!(machine.sha256("/usr/local/bin/ployzd.previous"), confirmed.sha256);
    let _ = machine.run(RECOVER).expect(0).says(&["1.6.0"]);
    machine.assert_runs("1.6.0", &confirmed.sha256);
}

#[test]
fn a_release_is_put_back_whatever_is_wrong_with_the_machine() {
    let (_server, machine) = prepared("recover", Image::Trixie);
    let (good, old) = (release("1.5.0"), release("1.4.0"));
    // Not without a yes.
    machine.run("useradd -m alice").ok();
    let before = machine.watch();
    let _ = machine
        .run("/usr/local/bin/ployzd.previous recover </dev/null")
        .expect(4)
        .says(&["recover --yes", "nothing was changed"]);
    let _ =
        machine.run_as("alice", "/usr/local/bin/ployzd.previous recover --yes").expect(77).says(&["sudo"]);
    before.assert_same(&machine.watch());
    // Another has admission: named, and what was stopped runs again.
    let holder = "import fcntl, struct, time\nf = open('/var/lib/ployz-install/admission.lock', 'r+')\n\
        fcntl.fcntl(f, 37, struct.pack('hhqqi', fcntl.F_WRLCK, 0, 0, 1, 0))\ntime.sleep(100)\n";
    machine.write("/root/hold.py", holder);
    let held = machine.start_run("exec python3 /root/hold.py");
    machine.until("it is held", |machine| machine.run(&format!("{PLOYZD} install --docker none")).code == 3);
    let _ = machine.run(RECOVER).expect(3).says(&["admission is held by pid", "python3"]);
    machine.assert_runs("1.5.0", &good.sha256);
    drop(held);
    machine.run("pkill -f '[h]old.py'; true").ok();

    let newest = "/var/lib/ployz-install/attempts/$(ls -t /var/lib/ployz-install/attempts | head -1)";
    for (what, broken) in [
        ("the daemon is dead", "systemctl stop ployz.socket ployz.service".to_owned()),
        ("the daemon hangs", "systemctl kill -s STOP ployz.service".to_owned()),
        ("the newest record is garbage", format!("head -c 300 /dev/urandom >{newest}")),
        ("all records are gone", "rm -r /var/lib/ployz-install/attempts".to_owned()),
        ("installed.json is missing", "rm /usr/local/lib/ployz/installed.json".to_owned()),
        ("installed.json is garbage", "echo garbage >/usr/local/lib/ployz/installed.json".to_owned()),
        ("install.json is garbage", "echo garbage >/etc/ployz/install.json".to_owned()),
        ("the units are garbage", "cd /usr/local/lib/systemd/system; echo garbage >ployz.service; \
            printf '[Socket]\\nListenStream=nowhere\\n' >ployz.socket; systemctl daemon-reload; systemctl restart ployz.socket; true".to_owned()),
        ("the units are gone", "rm /usr/local/lib/systemd/system/ployz*; systemctl daemon-reload".to_owned()),
        ("the binary is gone", format!("rm {PLOYZD}")),
        ("the binary is no program", format!("systemctl stop ployz.socket ployz.service; echo x >{PLOYZD}.x; chmod 755 {PLOYZD}.x; mv {PLOYZD}.x {PLOYZD}")),
        ("the socket hit a start limit", "mkdir -p /run/systemd/system/ployz.socket.d /run/systemd/system/ployz.service.d; \
            printf '[Unit]\\nStartLimitIntervalSec=100\\nStartLimitBurst=1\\n' | tee /run/systemd/system/ployz.socket.d/x.conf >/run/systemd/system/ployz.service.d/x.conf; \
            systemctl daemon-reload; for i in 1 2 3 4; do systemctl restart ployz.socket ployz.service; done; \
            rm -r /run/systemd/system/ployz.s*.d; systemctl daemon-reload; systemctl is-active ployz.socket; true".to_owned()),
    ] {
        machine.run(&broken).ok();
        let run = machine.run_within(120, RECOVER);
        assert_eq!(run.code, 0, "{what}: {}", run.shown());
        // Which of the two it was: the retained one is put back each time.
        let in_place = machine.sha256(PLOYZD);
        assert!([&good.sha256, &old.sha256].contains(&&in_place), "{what}");
        let version = if in_place == good.sha256 { "1.5.0" } else { "1.4.0" };
        machine.assert_runs(version, &in_place);
        machine.assert_healthy();
        machine.assert_nothing_left();
        note(&format!("{what}: {version} runs; previous {}", &machine.sha256("/usr/local/bin/ployzd.previous")[..8]));
        // And the next upgrade finds a Machine that is whole.
        if what == "install.json is garbage" {
            machine.write("/etc/ployz/install.json", "{\"schema\":1,\"confirm_window\":1}");
        }
        // The other one is retained again.
        let other = if version == "1.5.0" { &old } else { &good };
        machine.install(other).ok();
        if machine.sha256("/usr/local/bin/ployzd.previous") == other.sha256 {
            machine.run("rm /usr/local/bin/ployzd.previous").ok();
            machine.install(if version == "1.5.0" { &good } else { &old }).ok();
        }
    }
}
