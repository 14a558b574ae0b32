//! Rung 2: the unit files: only what the oldest supported systemd knows, nothing looser than it must be without a
//! reason beside it, and what they start is what is replaced.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::process::Command;

/// A line of a unit file, with the comment right above it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Line {
    section: String,
    key: String,
    value: String,
    reason: String,
}

/// Name, text and lines of each unit file.
fn units() -> Vec<(String, String, Vec<Line>)> {
    let mut units = Vec::new();
    for entry in fs::read_dir("hardening").unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap().to_owned();
        if [".service", ".socket"].iter().any(|kind| name.ends_with(kind)) {
            let text = fs::read_to_string(&path).unwrap();
            let lines = parse(&text);
            units.push((name, text, lines));
        }
    }
    units.sort_by(|a, b| a.0.cmp(&b.0));
    assert!(units.len() >= 2);
    units
}

fn parse(text: &str) -> Vec<Line> {
    let (mut lines, mut section, mut reason) = (Vec::new(), String::new(), String::new());
    for line in text.lines() {
        if let Some(comment) = line.strip_prefix('#') {
            reason.push_str(comment);
        } else if let Some(name) = line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            (section, reason) = (name.to_owned(), String::new());
        } else if let Some((key, value)) = line.split_once('=') {
            let (key, value) = (key.to_owned(), value.to_owned());
            lines.push(Line { section: section.clone(), key, value, reason: std::mem::take(&mut reason) });
        } else {
            assert_eq!(line, "", "a line that is no line of a unit file");
            reason.clear();
        }
    }
    lines
}

#[test]
fn only_keys_that_systemd_252_knows() {
    let text = fs::read_to_string("tests/fixtures/systemd-252-keys.txt").unwrap();
    let mut known: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    let mut section = "";
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        match line.strip_prefix('[').and_then(|line| line.strip_suffix(']')) {
            Some(name) => section = name,
            None => drop(known.entry(section).or_default().insert(line)),
        }
    }
    assert!(
        known["Service"].len() > 200 && !known["Service"].contains("RootEphemeral"),
        "the list is of 252"
    );
    for (name, _, lines) in units() {
        for line in lines {
            let keys =
                known.get(line.section.as_str()).unwrap_or_else(|| panic!("{name}: [{}]", line.section));
            assert!(
                keys.contains(line.key.as_str()),
                "{name}: {} is not known in [{}]",
                line.key,
                line.section
            );
        }
    }
}

/// The strictest value of each option of the security budget, for a service. A unit that has another value, or leaves
/// the option out, says why.
const STRICTEST: [(&str, &str); 32] = [
    ("CapabilityBoundingSet", ""),
    ("AmbientCapabilities", ""),
    ("NoNewPrivileges", "yes"),
    ("ProtectSystem", "strict"),
    ("ProtectHome", "yes"),
    ("PrivateTmp", "yes"),
    ("PrivateDevices", "yes"),
    ("PrivateUsers", "yes"),
    ("PrivateIPC", "yes"),
    ("PrivateMounts", "yes"),
    ("PrivateNetwork", "yes"),
    ("ProtectProc", "invisible"),
    ("ProcSubset", "pid"),
    ("ProtectClock", "yes"),
    ("ProtectHostname", "yes"),
    ("ProtectKernelLogs", "yes"),
    ("ProtectKernelModules", "yes"),
    ("ProtectKernelTunables", "yes"),
    ("ProtectControlGroups", "yes"),
    ("RestrictNamespaces", "yes"),
    ("RestrictRealtime", "yes"),
    ("RestrictSUIDSGID", "yes"),
    ("LockPersonality", "yes"),
    ("MemoryDenyWriteExecute", "yes"),
    ("RemoveIPC", "yes"),
    ("KeyringMode", "private"),
    ("DevicePolicy", "closed"),
    ("RestrictAddressFamilies", "AF_UNIX"),
    ("SystemCallArchitectures", "native"),
    ("SystemCallErrorNumber", "EPERM"),
    ("LimitCORE", "0"),
    ("UMask", "0077"),
];

/// Options that follow from another one that is relaxed, with its reason.
const FOLLOWS: [(&str, &str); 1] = [("PrivateNetwork", "RestrictAddressFamilies")];

#[test]
fn every_option_that_is_looser_than_it_could_be_has_its_reason() {
    for (name, text, lines) in units().into_iter().filter(|(name, _, _)| name.ends_with(".service")) {
        let of = |key: &str| lines.iter().find(|line| line.key == key);
        for (key, strictest) in STRICTEST {
            let follows = FOLLOWS.iter().find(|(option, _)| *option == key).and_then(|(_, other)| of(other));
            match of(key) {
                Some(line) if line.value == strictest => {}
                Some(line) => {
                    assert!(line.reason.len() > 20, "{name}: {key}={} without a reason", line.value);
                }
                None => {
                    let said = text.lines().any(|line| line.starts_with('#') && line.contains(key));
                    let reason = follows.is_some_and(|line| line.reason.len() > 20);
                    assert!(said || reason, "{name} leaves {key}={strictest} out without a reason");
                }
            }
        }
        let filters: Vec<_> = lines.iter().filter(|line| line.key == "SystemCallFilter").collect();
        assert_eq!(filters[0].value, "@system-service", "{name}: an allow list first");
        assert!(
            filters[1..].iter().any(|line| line.value.starts_with('~')),
            "{name}: and what is taken from it"
        );
        for key in ["SupplementaryGroups", "ReadWritePaths", "StartLimitIntervalSec", "PAMName", "Delegate"] {
            for line in lines.iter().filter(|line| line.key == key) {
                assert!(line.reason.len() > 20, "{name}: {key}={} without a reason", line.value);
            }
        }
    }
}

#[test]
fn nobody_is_root_without_a_reason_and_nobody_is_in_group_docker() {
    for (name, text, lines) in units() {
        let values = |key: &str| lines.iter().filter(|line| line.key == key).cloned().collect::<Vec<_>>();
        if name.ends_with(".service") {
            let user = values("User");
            assert!(
                user.iter().any(|line| line.value.starts_with("ployz"))
                    || (user.is_empty()
                        && text
                            .lines()
                            .any(|line| line.starts_with("# Root, without User=") && line.len() > 40)),
                "{name} runs as root without a reason"
            );
        } else {
            assert_eq!(values("SocketUser").len(), 1, "{name}");
            let mode = &values("SocketMode")[0].value;
            assert!(mode == "0600" || mode == "0660", "{name}: {mode}");
        }
        for key in ["Group", "SupplementaryGroups", "SocketGroup"] {
            assert!(values(key).iter().all(|line| !line.value.contains("docker")), "{name}");
        }
    }
}

#[test]
fn nothing_waits_for_docker_or_the_network() {
    for (name, _, lines) in units() {
        for line in lines.iter().filter(|line| line.section == "Unit") {
            for other in ["docker", "containerd", "network"] {
                assert!(!line.value.contains(other), "{name}: {}={}", line.key, line.value);
            }
        }
    }
}

#[test]
fn what_is_started_is_what_is_replaced() {
    for (name, _, lines) in units() {
        for line in lines.iter().filter(|line| line.key.starts_with("Exec")) {
            let program = line.value.trim_start_matches(['-', '@', ':', '+', '!']);
            let program = program.split_whitespace().next().unwrap_or_default();
            assert_eq!(program, "/usr/local/bin/ployzd", "{name}: {}", line.key);
            assert!(!line.value.contains("sh -c"), "{name}");
        }
        let starts = lines.iter().filter(|line| line.key == "ExecStart").count();
        assert_eq!(starts, usize::from(name.ends_with(".service")), "{name}");
        assert!(lines.iter().any(|line| line.key == "Description"), "{name}");
    }
}

#[test]
fn a_socket_and_its_service_survive_a_daemon_that_fails() {
    let units = units();
    let has = |name: &str, key: &str, value: &str| {
        let lines = &units.iter().find(|unit| unit.0 == name).unwrap_or_else(|| panic!("{name}")).2;
        assert!(lines.iter().any(|line| line.key == key && line.value == value), "{name}: {key}={value}");
    };
    has("ployz.service", "StartLimitIntervalSec", "0");
    has("ployz.service", "Restart", "always");
    has("ployz.service", "Type", "notify");
    has("ployz.service", "RestartPreventExitStatus", "78");
    has("ployz.service", "Requires", "ployz.socket");
    has("ployz.socket", "TriggerLimitIntervalSec", "0");
    has("ployz-volume-plugin.service", "StartLimitIntervalSec", "0");
    has("ployz-volume-plugin.service", "Restart", "always");
    has("ployz-volume-plugin.service", "Type", "notify");
    has("ployz-volume-plugin.service", "Requires", "ployz-volume-plugin.socket");
    has("ployz-volume-plugin.socket", "TriggerLimitIntervalSec", "0");
    has("ployz-volume-plugin.socket", "ListenStream", "/run/docker/plugins/ployz.sock");
    has("ployz-volume-plugin.socket", "SocketMode", "0600");
    has("ployz.socket", "ListenStream", "/run/ployz/ployz.sock");
    has("ployz.socket", "SocketMode", "0660");
    has("ployz.socket", "SocketUser", "ployz");
    has("ployz.socket", "SocketGroup", "ployz");
}

#[test]
fn accounts_that_units_name_are_declared() {
    let declared = fs::read_to_string("hardening/sysusers.conf").unwrap();
    let lines = declared.lines().filter(|line| !line.starts_with('#'));
    let names: BTreeSet<_> = lines.filter_map(|line| line.split_whitespace().nth(1)).collect();
    for (name, _, lines) in units() {
        for key in ["User", "Group", "SupplementaryGroups", "SocketUser", "SocketGroup"] {
            for line in lines.iter().filter(|line| line.key == key) {
                for account in line.value.split_whitespace() {
                    assert!(names.contains(account) || account == "root", "{name}: {key}={account}");
                }
            }
        }
    }
    assert!(!declared.contains("docker"), "a group that is another's to make");
    let members = declared.lines().any(|line| line.starts_with('m'));
    assert!(!members, "nobody is put into a group by declaration");
}

/// The budget of `systemd-analyze security`, in tenths.
const EXPOSURE: [(&str, u32); 3] =
    [("ployz.service", 13), ("ployz-upgrade@.service", 28), ("ployz-volume-plugin.service", 22)];

#[test]
fn exposure_is_within_the_budget() {
    let tool = "/usr/bin/systemd-analyze";
    let version = Command::new(tool).arg("--version").output();
    let version =
        version.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    let version = version.split_whitespace().nth(1).and_then(|word| word.parse::<u32>().ok());
    if version.is_none_or(|version| version < 252) {
        return;
    }
    for (name, budget) in EXPOSURE {
        let threshold = format!("--threshold={budget}");
        let path = Path::new("hardening").join(name);
        let output = Command::new(tool)
            .args(["security", "--offline=yes", "--no-pager", &threshold])
            .arg(path)
            .output();
        let output = output.unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{name}: {}", text.lines().last().unwrap_or_default());
        assert!(text.contains("Overall exposure level"), "{text}");
    }
}
