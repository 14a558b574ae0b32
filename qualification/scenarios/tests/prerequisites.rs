//! What a host must have: what `--software-only` finds missing, Docker as it is, and callers with odd environments.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failed assumption fails the test"
)]

use scenarios::{Image, Machine, release, repository};

/// Everything that an installation could change.
const HOST: &str =
    "find /usr/local /etc/systemd /var/lib/ployz /run/ployz -printf '%p %m %u:%g %i\n' 2>/dev/null | sort
    sha256sum /etc/passwd /etc/group /etc/shadow /etc/gshadow";
const MODES: [(&str, &str); 10] = [
    ("/usr/local/bin/ployzd", "file root:root 755"),
    ("/usr/local/lib/ployz", "directory root:root 755"),
    ("/usr/local/lib/ployz/installed.json", "file root:root 644"),
    ("/usr/local/lib/systemd/system", "directory root:root 755"),
    ("/usr/local/lib/systemd/system/ployz.service", "file root:root 644"),
    ("/usr/local/lib/sysusers.d/ployz.conf", "file root:root 644"),
    ("/var/lib/ployz-install", "directory root:root 755"),
    ("/var/lib/ployz-install/admission.lock", "file root:ployz-admission 640"),
    ("/var/lib/ployz-install/attempts", "directory root:ployz 750"),
    ("/var/lib/ployz", "directory ployz:ployz 750"),
];

/// The executable of a release that is delivered, with the arguments that install it.
fn installer(machine: &Machine) -> String {
    let release = release("1.4.0");
    let from = machine.deliver(&release);
    format!("/root/1.4.0-{}/ployzd install {from} --json", &release.sha256[..8])
}

#[test]
fn software_only_names_everything_that_is_missing_and_changes_nothing() {
    let machine = Machine::named("software-only").boot();
    let install = installer(&machine);
    let before = machine.run(HOST).stdout;
    let run = machine.run(&format!("{install} --software-only")).expect(4);
    let missing =
        ["user ployz", "user ployz-fetch", "user ployz-deploy", "group ployz-admission", "/var/lib/ployz"];
    let _ = run.clone().says(&missing).says(&["no Docker", "--software-only"]);
    assert_eq!(run.record()["installation"], "unchanged");
    let after = machine.run(HOST).stdout;
    // The directories of staging may be there; nothing else.
    let new: Vec<&str> = after.lines().filter(|line| !before.contains(line)).collect();
    assert!(new.iter().all(|line| line.starts_with("/usr/local/lib")), "something was changed: {new:#?}");
    machine.assert_nothing_left();

    // As whoever prepares hosts does it: declared accounts, a directory, nothing else.
    let conf = repository().join("hardening/sysusers.conf");
    machine.put(&conf, "/etc/sysusers.d/ployz.conf");
    machine.run("systemd-sysusers && install -d -o ployz -g ployz -m 750 /var/lib/ployz").ok();
    let run =
        machine.run(&format!("{install} --software-only")).expect(4).says(&["no Docker", "--docker none"]);
    assert!(!run.both().contains("user ployz"), "{}", run.shown());
    let accounts = machine.run("sha256sum /etc/passwd /etc/group").stdout;
    machine.run(&format!("{install} --software-only --docker none")).ok();
    machine.assert_runs("1.4.0", &release("1.4.0").sha256);
    assert_eq!(machine.run("sha256sum /etc/passwd /etc/group").stdout, accounts, "accounts were changed");
    // The choice about Docker is remembered.
    machine.run(&format!("{install} --software-only")).ok();
}

#[test]
fn software_only_with_docker_gives_the_deploy_worker_its_group_and_the_daemon_none() {
    let machine = Machine::named("software-docker").image(Image::TrixieDocker).boot();
    let install = installer(&machine);
    let conf = repository().join("hardening/sysusers.conf");
    machine.put(&conf, "/etc/sysusers.d/ployz.conf");
    machine.run("systemd-sysusers && install -d -o ployz -g ployz -m 750 /var/lib/ployz").ok();
    machine.run(&format!("{install} --software-only")).ok();
    the_deploy_worker_alone_may_use_docker(&machine);
}

#[test]
fn docker_is_used_as_it_is_there_and_named_when_it_is_not() {
    let machine = Machine::named("docker-there").image(Image::TrixieDocker).boot();
    machine.start_docker();
    let before =
        machine.run("systemctl show -p MainPID,NRestarts docker.service; md5sum /etc/docker/*").stdout;
    let run = machine.run(&installer(&machine)).expect(0);
    assert_eq!(run.record()["warnings"].as_array().unwrap().len(), 0, "{}", run.shown());
    the_deploy_worker_alone_may_use_docker(&machine);
    let after =
        machine.run("systemctl show -p MainPID,NRestarts docker.service; md5sum /etc/docker/*").stdout;
    assert_eq!(before, after, "Docker was touched");

    let without = Machine::named("docker-not-there").boot();
    // Where it is to be had nowhere, that is the failure, and nothing is in place.
    let run = without.run_within(120, &installer(&without)).expect(4);
    let failed = run.outcome()["failed"].clone();
    assert_eq!(failed["stage"], "preparing", "{}", run.shown());
    assert!(failed["error"].to_string().contains("apt-get"), "{failed}");
    assert_eq!(without.run("ls -A /usr/local/bin /etc/docker").text(), "/etc/docker:\n\n/usr/local/bin:");
}

fn the_deploy_worker_alone_may_use_docker(machine: &Machine) {
    machine.assert_runs("1.4.0", &release("1.4.0").sha256);
    assert_eq!(machine.run("getent group docker | cut -d: -f4").text(), "ployz-deploy");
    let pid = machine.daemon().pid;
    let docker = machine.run("getent group docker | cut -d: -f3").text().to_owned();
    let groups = machine.run(&format!("sed -n 's/^Groups://p' /proc/{pid}/status")).expect(0);
    assert!(!groups.text().split_whitespace().any(|gid| gid == docker), "the daemon is in group docker");
}

/// Each environment with its own machine, since only a first installation makes everything.
fn installs_in(name: &str, environment: &str) {
    let machine = Machine::named(name).boot();
    let install = installer(&machine);
    let run = machine.run(&environment.replace("INSTALL", &install));
    assert!(run.code == 0, "{}", run.shown());
    machine.assert_modes(&MODES);
    machine.assert_runs("1.4.0", &release("1.4.0").sha256);
    machine.assert_nothing_left();
}

#[test]
fn installs_with_a_tight_umask() {
    installs_in("umask", "umask 0077; INSTALL --docker none");
}

#[test]
fn installs_with_closed_standard_streams() {
    installs_in("closed", "INSTALL --docker none <&- >&- 2>&-");
}

#[test]
fn installs_without_home_path_or_language() {
    installs_in("bare-environment", "exec env -i PATH= INSTALL --docker none");
}

#[test]
fn installs_in_turkish_from_a_directory_that_is_gone() {
    let command = "mkdir /tmp/gone && cd /tmp/gone && rmdir /tmp/gone
        LC_ALL=tr_TR.UTF-8 LANG=tr_TR.UTF-8 TZ=Asia/Kolkata INSTALL --docker none";
    installs_in("turkish", command);
}
