//! Images that have to be pulled first: from a registry that is slow, breaks or stalls. Progress is shown, what fails is
//! named and changes nothing, what was admitted is finished, and what hangs can't keep a person from going back.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failed assumption fails the test"
)]

use std::time::Instant;

use scenarios::{Image, Machine, Registry, note, release};
use serde_json::Value;

const PLOYZD: &str = "/usr/local/bin/ployzd";
fn prepared(name: &str) -> Machine {
    let machine = Machine::named(name).image(Image::TrixieDocker).boot();
    machine.start_docker();
    for version in ["1.4.0", "1.5.0"] {
        let from = machine.deliver(&release(version));
        let dir =
            from.split(" --archive ").nth(1).and_then(|rest| rest.split("/ployzd_linux").next()).unwrap();
        machine.run(&format!("{dir}/ployzd install {from} --docker auto")).ok();
    }
    machine
}

fn mode(machine: &Machine, registry: &Registry, mode: &str) {
    registry.does(mode);
    machine.run(&format!("docker rmi -f {} >/dev/null 2>&1; true", registry.image())).ok();
}

fn deploy(registry: &Registry) -> String {
    format!("service deploy web --image {} --publish 8080:8080", registry.image())
}

#[test]
fn a_pull_shows_how_far_it_is_goes_on_without_its_asker_and_is_named_when_it_fails() {
    let machine = prepared("pulls");
    let mut registry = Registry::start();
    let deploy = deploy(&registry);
    machine.run(&format!("{PLOYZD} service deploy web --image web:1 --publish 8080:8080")).ok();
    let page = |machine: &Machine| machine.run("curl -sS -m 5 http://127.0.0.1:8080/").text().to_owned();
    let fails = |machine: &Machine, what: &str, words: &str| {
        let run = machine.run_within(120, &format!("{PLOYZD} {deploy}")).expect(4);
        let _ =
            run.says(&["can't be pulled", words, "Now: nothing of the service was changed", "docker pull"]);
        assert_eq!(page(machine), "page 1", "{what}");
        assert_eq!(machine.containers("web"), ["ployz-web running"], "{what}");
    };
    mode(&machine, &registry, "break");
    fails(&machine, "it breaks", "unexpected EOF");
    registry.away(|| fails(&machine, "it is away", "connection refused"));
    let missing =
        machine.run(&format!("{PLOYZD} service deploy web --image 10.77.0.1:9/nothing:1")).expect(4);
    let _ = missing.says(&["can't be pulled", "10.77.0.1:9/nothing:1"]);

    mode(&machine, &registry, "slow");
    let run = machine.run_within(120, &format!("{PLOYZD} {deploy} --json")).expect(0);
    let events: Vec<Value> = run.stdout.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let bytes: Vec<u64> = events.iter().filter_map(|event| event["progress"]["bytes"].as_u64()).collect();
    note(&format!("{} counts of bytes, up to {:?}", bytes.len(), bytes.iter().max()));
    assert!(bytes.len() > 3 && bytes.is_sorted() && bytes.iter().max() > Some(&1_000_000), "{}", run.shown());
    assert_eq!(page(&machine), "page of the registry");

    // The asker leaves in the middle of the pull.
    machine.run(&format!("{PLOYZD} service deploy web --image web:1 --publish 8080:8080")).ok();
    mode(&machine, &registry, "slow");
    let asked = machine.start_run(&format!("exec {PLOYZD} {deploy}"));
    machine.until("it is under way", |machine| machine.api()["admission"]["what"] == "deploying web");
    machine.run("pkill -KILL -f '[p]loyzd service deploy'; systemctl restart ployz.service").ok();
    assert_ne!(asked.end().code, 0);
    let seen = machine.api()["admission"].clone();
    assert_eq!(seen["state"], "mutating", "{seen}");
    machine.until("it is finished", |machine| page(machine) == "page of the registry");
    machine.until("admission is free", |machine| machine.api()["admission"]["state"] == "free");
    machine.assert_healthy();
}

#[test]
fn a_deploy_that_hangs_and_one_that_never_ends_asking_keep_nobody_from_going_back() {
    let machine = prepared("pull-hangs");
    let registry = Registry::start();
    let deploy = deploy(&registry);
    let (old, new) = (release("1.4.0"), release("1.5.0"));
    machine.run("useradd -m mallory && usermod -a -G ployz mallory").ok();
    machine.run(&format!("{PLOYZD} service deploy web --image web:1")).ok();
    let traffic = machine.traffic("ployz-web");
    mode(&machine, &registry, "stall");
    let hung = machine.start_run(&format!("exec {PLOYZD} {deploy}"));
    machine.until("it is under way", |machine| machine.api()["admission"]["what"] == "deploying web");
    let _ =
        machine.run(&format!("{PLOYZD} upgrade --version 1.4.0")).expect(3).says(&["deploying web since"]);
    let started = Instant::now();
    let run = machine.run_within(100, "/usr/local/bin/ployzd.previous recover --yes").expect(0);
    note(&format!("a Deploy hangs, and 1.4.0 is put back in {:.1} s", started.elapsed().as_secs_f32()));
    machine.assert_runs("1.4.0", &old.sha256);
    assert!(hung.end().code != 0, "{}", run.shown());
    assert_eq!(machine.containers("web"), ["ployz-web running"]);

    // Docker itself hangs in the middle of one.
    let hung = machine.start_run(&format!("exec {PLOYZD} service deploy web --image web:2"));
    machine.until("the new container is made", |machine| machine.containers("web").len() == 2);
    machine.run("systemctl kill -s STOP docker.service").ok();
    let started = Instant::now();
    let _ = machine.run_within(120, "/usr/local/bin/ployzd.previous recover --yes").expect(0);
    note(&format!("Docker hangs, and 1.5.0 is put back in {:.1} s", started.elapsed().as_secs_f32()));
    machine.assert_runs("1.5.0", &new.sha256);
    machine.run("systemctl kill -s CONT docker.service").ok();
    drop(hung);
    machine.until("exactly one serves", |machine| machine.containers("web") == ["ployz-web running"]);

    // Somebody of the group asks for one Deploy after another.
    mode(&machine, &registry, "slow");
    machine.run("systemd-run -q --unit mallory --uid mallory sh -c 'while :; do /usr/local/bin/ployzd service deploy x --image web:1 --env A=$(date +%N); done'").ok();
    std::thread::sleep(std::time::Duration::from_secs(3));
    for (version, release) in [("1.4.0", &old), ("1.5.0", &new)] {
        machine.run_within(120, "/usr/local/bin/ployzd.previous recover --yes").ok();
        machine.assert_runs(version, &release.sha256);
    }
    machine.run("systemctl stop mallory").ok();
    let served = machine.served(&traffic);
    note(&format!("{served:?}"));
}
