//! The doctor: clean on a healthy Machine, and each check made to fail once by breaking what it looks at.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failed assumption fails the test"
)]

use scenarios::{Image, Machine, note, release, serve};
use serde_json::Value;

const DOCTOR: &str = "/usr/local/bin/ployzd doctor";
/// Everything that a look must leave as it is.
const TREE: &str = "find /usr/local/bin /usr/local/lib /etc /var/lib/ployz /var/lib/ployz-install /run/ployz /run/systemd/transient -printf '%p %i %s %C@ %u:%g %m\\n' \
    2>/dev/null | sort; systemctl list-units --all --plain --no-legend 'ployz*' | grep -v '^ployz-deploy@' | awk '{print $1, $3, $4}'";

fn check(machine: &Machine, name: &str) -> Value {
    let run = machine.run(&format!("{DOCTOR} --json"));
    let all = run.json();
    let checks = all["checks"].as_array().unwrap_or_else(|| panic!("{}", run.shown()));
    checks.iter().find(|check| check["name"] == name).unwrap_or_else(|| panic!("no {name}")).clone()
}

/// A check, what breaks what it looks at, what it says then, and what mends it.
const BROKEN: [(&str, &str, &str, &str); 23] = [
    (
        "filesystems",
        "mount -t tmpfs -o ro tmpfs /usr/local/lib/systemd",
        "is mounted read-only",
        "umount /usr/local/lib/systemd",
    ),
    (
        "filesystems",
        "mount --bind /usr/local/lib /usr/local/lib && mount -o remount,bind,noexec /usr/local/lib",
        "noexec",
        "umount /usr/local/lib",
    ),
    (
        "settings",
        "cp /etc/ployz/install.json /root/; echo '{\"colour\": 1}' >/etc/ployz/install.json",
        "unknown field",
        "cp /root/install.json /etc/ployz/install.json",
    ),
    (
        "source",
        "cp /etc/hosts /root/; sed -i /releases.ployz.test/d /etc/hosts",
        "releases.ployz.test",
        "cp /root/hosts /etc/hosts",
    ),
    (
        "source",
        "cp /etc/ployz/install.json /root/; jq '.proxy=\"http://127.0.0.1:9\"' /root/install.json >/etc/ployz/install.json",
        "through http://127.0.0.1:9",
        "cp /root/install.json /etc/ployz/install.json",
    ),
    (
        "clock",
        "cp -p /usr/local/lib/ployz/installed.json /root/; jq '.current.confirmed_at=\"2099-01-01T00:00:00Z\"' /root/installed.json >/usr/local/lib/ployz/installed.json",
        "before the last installation",
        "cp -p /root/installed.json /usr/local/lib/ployz/installed.json",
    ),
    ("accounts", "gpasswd -d ployz-deploy docker", "not in group docker", "/usr/local/bin/ployzd install"),
    ("accounts", "usermod -a -G sudo ployz", "user ployz is in group sudo", "gpasswd -d ployz sudo"),
    ("owners", "chmod o+w /usr/local/lib/ployz", "/usr/local/lib/ployz", "chmod o-w /usr/local/lib/ployz"),
    ("owners", "chown alice /usr/local/bin/ployzd", "ployzd", "chown root /usr/local/bin/ployzd"),
    (
        "units",
        "sed -i 's/^RestartSec=2/RestartSec=9/' /usr/local/lib/systemd/system/ployz.service",
        "\"RestartSec=9\" instead of \"RestartSec=2\"",
        "/usr/local/bin/ployzd install",
    ),
    (
        "units",
        "systemctl disable --quiet ployz.socket",
        "ployz.socket is disabled",
        "systemctl enable --quiet ployz.socket",
    ),
    (
        "effective units",
        "mkdir -p /etc/systemd/system/ployz.service.d; printf '[Service]\\nExecStart=\\nExecStart=/bin/true\\n' >/etc/systemd/system/ployz.service.d/o.conf; systemctl daemon-reload",
        "starts /bin/true",
        "systemctl revert ployz.service",
    ),
    (
        "effective units",
        "systemctl mask --quiet ployz-deploy.socket",
        "ployz-deploy.socket is masked",
        "systemctl unmask --quiet ployz-deploy.socket; systemctl start ployz-deploy.socket",
    ),
    ("daemon", "systemctl stop ployz.service ployz.socket", "", "systemctl start ployz.socket ployz.service"),
    (
        "daemon",
        "systemctl stop ployz-upgrade.socket",
        "ployz-upgrade.socket is closed",
        "systemctl start ployz-upgrade.socket",
    ),
    (
        "previous",
        "mv /usr/local/bin/ployzd.previous /root/; echo '#!/bin/false' >/usr/local/bin/ployzd.previous; chmod 755 /usr/local/bin/ployzd.previous",
        "can't be put back",
        "mv /root/ployzd.previous /usr/local/bin/ployzd.previous",
    ),
    (
        "last attempt",
        "/usr/local/bin/ployzd install --version 1.5.0 --archive /root/1.5.0-*/ployzd_linux_amd64.tar.gz --checksums /dev/null; true",
        "failed",
        "/usr/local/bin/ployzd install",
    ),
    (
        "docker",
        "systemctl stop docker.socket docker.service",
        "not running",
        "systemctl start docker.service",
    ),
    (
        "docker",
        "cp /etc/docker/daemon.json /root/; echo '{}' >/etc/docker/daemon.json; systemctl restart docker",
        "in its own store (overlay2)",
        "cp /root/daemon.json /etc/docker/daemon.json; systemctl restart docker",
    ),
    (
        "sandbox",
        "mkdir -p /etc/systemd/system/ployz.service.d; printf '[Service]\\nProtectSystem=no\\nPrivateDevices=no\\nNoNewPrivileges=no\\nSystemCallFilter=\\n' >/etc/systemd/system/ployz.service.d/o.conf; systemctl daemon-reload",
        "ployz.service is exposed at",
        "systemctl revert ployz.service",
    ),
    (
        "storage",
        "systemctl stop ployz-volume-plugin.socket ployz-volume-plugin.service",
        "ployz-volume-plugin.socket is inactive",
        "systemctl start ployz-volume-plugin.socket ployz-volume-plugin.service",
    ),
    ("storage", "echo damaged >/etc/ployz/storage.json", "is not understood", "rm /etc/ployz/storage.json"),
];

#[test]
fn each_check_is_clean_on_a_healthy_machine_and_fails_for_what_it_looks_at() {
    let (old, new) = (release("1.4.0"), release("1.5.0"));
    let server = serve("doctor").release(&old).release(&new).channel("stable", "1.5.0").start();
    let machine =
        Machine::named("doctor").image(Image::TrixieDocker).served_by(&server).installed("1.4.0").boot();
    machine.start_docker();
    machine.run("useradd -m alice && useradd -m -G ployz carol").ok();
    machine.deliver(&new);
    machine.run_within(120, "/usr/local/bin/ployzd install --version 1.5.0 --docker auto").ok();
    let before = machine.run(TREE).stdout;
    let clean = machine.run(DOCTOR).expect(0);
    note(&format!("the doctor of a healthy Machine:\n{}", clean.stdout));
    assert_eq!(clean.stdout.lines().count(), 17, "{}", clean.shown());
    let json = machine.run(&format!("{DOCTOR} --json")).expect(0).json();
    assert!(json["checks"].as_array().unwrap().iter().all(|check| check["state"] == "ok"), "{json}");
    // Who is no root sees less, says so, and sends nobody to mend what is whole.
    for user in ["alice", "carol"] {
        let run = machine.run_as(user, DOCTOR).expect(6);
        assert!(run.stdout.contains("unknown") && !run.stdout.contains("FINDING"), "{user}: {}", run.shown());
    }
    assert_eq!(machine.run(TREE).stdout, before, "a look changed something");

    for (name, broken, words, mended) in BROKEN {
        machine.run(broken).ok();
        let found = check(&machine, name);
        let run = machine.run(DOCTOR);
        assert_eq!(found["state"], "finding", "{broken}: {found}");
        assert!(found["seen"].as_str().unwrap_or_default().contains(words), "{broken}: {found}");
        assert!(found["help"].as_array().is_some_and(|help| !help.is_empty()), "{found}");
        assert_eq!(run.code, 4, "{broken}: {}", run.shown());
        if broken.starts_with("systemctl stop ployz.service") {
            assert_eq!(
                machine.run("systemctl is-active ployz.service ployz.socket").text(),
                "inactive\ninactive",
                "it was started by a look"
            );
        }
        machine.run(mended).ok();
        let found = check(&machine, name);
        assert_eq!(found["state"], "ok", "after {mended}: {found}");
    }
    // Admission that is held is said, and is no fault.
    let id = machine.ask_and_hold(&server, "1.4.0");
    let found = check(&machine, "admission");
    assert!(found["state"] == "ok" && found["seen"].to_string().contains(&id), "{found}");
    server.obey();
    machine.outcome_of(&id);
    // An account that is gone, and a host whose systemd can't be asked.
    machine.run("systemctl stop ployz.socket ployz.service; userdel ployz-fetch").ok();
    assert!(check(&machine, "accounts")["seen"].to_string().contains("there is no user ployz-fetch"));
    let chroot = machine.run("mkdir -p /c && mount --bind / /c && mount --bind /proc /c/proc && chroot /c /usr/local/bin/ployzd doctor; e=$?; umount -R /c; exit $e");
    assert_eq!(chroot.code, 4, "{}", chroot.shown());
    let _ = chroot.says(&["systemd is not PID 1 here"]);
}
