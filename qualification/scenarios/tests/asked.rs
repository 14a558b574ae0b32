//! Upgrades that are asked for without root, through the daemon and the door.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failed assumption fails the test"
)]

use scenarios::{Image, Machine, note, release, serve};
use serde_json::Value;

const PLOYZD: &str = "/usr/local/bin/ployzd";
/// What an upgrade must not touch: identity, configuration, accounts.
const KEPT: &str =
    "sha256sum /var/lib/ployz/* /etc/ployz/* /etc/passwd /etc/group; ls -la /var/lib/ployz /etc/ployz";

#[test]
fn a_member_of_the_group_upgrades_and_goes_back_and_everything_else_stays() {
    upgrades_and_goes_back("asked", Image::Trixie);
}

#[test]
fn a_member_of_the_group_upgrades_and_goes_back_on_the_oldest_systemd() {
    upgrades_and_goes_back("asked-252", Image::Bookworm);
}

fn upgrades_and_goes_back(name: &str, image: Image) {
    let (old, new) = (release("1.4.0"), release("1.5.0"));
    let server = serve(name).release(&old).release(&new).channel("stable", "1.5.0").start();
    let machine = Machine::named(name).image(image).served_by(&server).installed("1.4.0").boot();
    machine.run("useradd -m alice && usermod -a -G ployz alice").ok();
    machine.run(&format!("{PLOYZD} machine initialize --name web-1")).ok();
    let kept = machine.run(KEPT).stdout;
    let id = machine.api()["id"].clone();

    let client = machine.client();
    let run = machine.run_as("alice", &format!("{PLOYZD} upgrade --channel stable"));
    let heard = client.stop();
    let run = run.expect(0).says(&["succeeded in", "1.5.0 is running", "attempt "]);
    drop(run);
    let after = machine.assert_runs("1.5.0", &new.sha256);
    let latest = machine.run_as("alice", &format!("{PLOYZD} attempt --json")).expect(0).last();
    let record = &latest["record"];
    assert_eq!(record["kind"], "upgrade", "{record}");
    assert_eq!(record["requested"], serde_json::json!({"channel": "stable"}), "{record}");
    assert_eq!(record["from"], "1.4.0", "{record}");
    assert_eq!(record["outcome"]["succeeded"]["pid"], after.pid, "{record}");
    assert_eq!(record["outcome"]["succeeded"]["sha256"], new.sha256.as_str(), "{record}");
    assert!(record["unit"].as_str().unwrap_or_default().starts_with("ployz-upgrade@"), "{record}");
    assert_eq!(record["warnings"], serde_json::json!([]), "{record}");
    assert_eq!((&latest["state"], &latest["in_place"]), (&"ended".into(), &"target".into()), "{latest}");
    machine.assert_nothing_left();
    note(&format!(
        "asked: {} answers of the Machine API, {} failures, longest wait {} ms",
        heard.answers,
        heard.failures.len(),
        heard.longest.as_millis()
    ));
    assert_eq!(heard.failures, Vec::<String>::new(), "requests were refused or failed during the upgrade");

    // The whole story, as root told it to the journal.
    let id_of = record["id"].as_str().unwrap();
    let story = machine.run(&format!("journalctl _UID=0 PLOYZ_ATTEMPT={id_of} -o cat --no-pager"));
    let _ = story.expect(0).says(&[
        "accepted: upgrade 1.5.0",
        "acquiring",
        "restarting",
        "confirming",
        "succeeded",
    ]);

    let back = machine.run_as("alice", &format!("{PLOYZD} upgrade --version 1.4.0 --json")).expect(0);
    let warnings = back.record()["warnings"].to_string();
    assert!(warnings.contains("1.4.0 is older than 1.5.0"), "{warnings}");
    machine.assert_runs("1.4.0", &old.sha256);
    assert_eq!(machine.sha256("/usr/local/bin/ployzd.previous"), new.sha256);
    assert_eq!(machine.run(KEPT).stdout, kept, "an upgrade touched what is not its own");
    assert_eq!(machine.api()["id"], id);
    assert_ne!(id, Value::Null);
    let state = machine.run("systemctl is-system-running; systemctl --failed --no-legend");
    assert_eq!(state.text(), "running", "a unit failed");
    machine.assert_nothing_left();
}

#[test]
fn a_socket_that_is_held_refuses_nobody_and_one_that_is_changed_says_that_it_did() {
    let (old, new) = (release("1.4.0"), release("1.5.0"));
    let changed = release("1.6.0").changed("Backlog=128\n", "Backlog=127\n");
    let server = serve("held").release(&old).release(&new).release(&changed).start();
    let machine = Machine::named("held").served_by(&server).installed("1.4.0").boot();
    for (to, held) in [(&new, true), (&changed, false)] {
        let client = machine.client();
        let id = machine.ask_for(&to.version);
        let record = machine.assert_upgraded(&id, to);
        let heard = client.stop();
        note(&format!(
            "sockets {}: {} answers, {} failed, longest wait {} ms; it says {}",
            if held { "held" } else { "reopened" },
            heard.answers,
            heard.failures.len(),
            heard.longest.as_millis(),
            record["warnings"]
        ));
        let said = record["warnings"].to_string().contains("ployz.socket was closed and opened again");
        assert_eq!(said, !held, "{record}");
        assert!(!held || heard.failures.is_empty(), "{:?}", heard.failures);
        assert!(heard.answers > 10 && heard.versions.last() == Some(&to.version), "{heard:?}");
    }
    assert_eq!(machine.run("systemctl show -P Backlog ployz.socket").text(), "127");
}

/// Units that an earlier release brought and the next one does not, an operator's drop-ins and choices, and a door that
/// is new to this Machine.
const EARLIER: &str = r#"
    set -e
    cd /usr/local/lib/systemd/system
    printf '[Service]\nExecStart=/bin/sleep infinity\n[Install]\nWantedBy=multi-user.target\n' >ployz-extra.service
    printf '[Service]\nExecStart=/bin/sleep infinity\n' >ployz-extra@.service
    for unit in ployz-extra.service ployz-upgrade@.service; do
        mkdir -p /etc/systemd/system/$unit.d
        printf '[Unit]\nX-Operator=yes\n[Service]\nNice=5\n' >/etc/systemd/system/$unit.d/own.conf
    done
    systemctl daemon-reload
    systemctl enable --now ployz-extra.service
    systemctl disable ployz.service ployz-upgrade.socket
    cd /usr/local/lib/ployz
    jq '.units |= (map(select(startswith("ployz-upgrade") | not)) + ["ployz-extra.service", "ployz-extra@.service"])' \
        installed.json >/root/installed.json
    cp /root/installed.json installed.json
"#;

#[test]
fn units_that_are_gone_are_removed_new_ones_enabled_and_an_operators_choices_stay() {
    let new = release("1.5.0");
    let server = serve("units").release(&release("1.4.0")).release(&new).start();
    let machine = Machine::named("units").served_by(&server).installed("1.4.0").boot();
    machine.run(EARLIER).ok();
    let id = machine.ask_for("1.5.0");
    let record = machine.outcome_of(&id);
    assert_eq!(record["outcome"]["succeeded"]["version"], "1.5.0", "{record}");
    assert_eq!(record["warnings"], serde_json::json!([]), "{record}");
    let gone = machine.run(
        "ls /usr/local/lib/systemd/system | grep extra; ls /etc/systemd/system/*.wants | grep extra
         systemctl is-active ployz-extra.service; pgrep -x sleep; true",
    );
    assert_eq!(gone.text(), "inactive", "what the release does not have is still there");
    let enabled = machine.run("systemctl is-enabled ployz-upgrade.socket ployz.service ployz.socket");
    assert_eq!(enabled.text(), "enabled\ndisabled\nenabled", "new is enabled, and disabled stays so");
    let kept =
        machine.run("cd /etc/systemd/system; ls ployz-extra.service.d ployz-upgrade@.service.d").expect(0);
    assert_eq!(kept.text().matches("own.conf").count(), 2, "{}", kept.shown());
    let units = machine.inventory()["units"].to_string();
    assert!(units.contains("ployz-upgrade@.service") && !units.contains("extra"), "{units}");
    machine.assert_nothing_left();
    machine.assert_healthy();
}
