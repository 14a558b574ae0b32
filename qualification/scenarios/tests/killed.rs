//! An upgrade that is killed at any of its durable steps: what is in place is whole and serves, what is said of it is
//! true, and the next `install` makes it right.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a failed assumption fails the test"
)]

use scenarios::{Machine, Release, note, release};
use serde_json::json;

/// The calls by which an installer makes something durable or current.
const STEPS: &str = "/^(rename|link|symlink|fsync|fdatasync)";
const PLOYZD: &str = "/usr/local/bin/ployzd";

/// The commands between which a machine goes to and fro.
struct Ways {
    old: Release,
    new: Release,
    upgrade: String,
    downgrade: String,
}

#[test]
fn an_upgrade_that_is_killed_before_any_even_step_of_its_activation_is_told_and_repaired() {
    killed_at_each_step("killed-even", 0);
}

#[test]
fn an_upgrade_that_is_killed_before_any_odd_step_of_its_activation_is_told_and_repaired() {
    killed_at_each_step("killed-odd", 1);
}

fn killed_at_each_step(name: &str, remainder: usize) {
    // Without a window each step takes two seconds; that what was confirmed stays is not the question here.
    let machine = Machine::named(name).setting("confirm_window", json!(0)).installed("1.4.0").boot();
    let (old, new) = (release("1.4.0"), release("1.5.0"));
    let upgrade = format!("{PLOYZD} install {} --json", machine.deliver(&new));
    let downgrade = format!("{PLOYZD} install {} --json", machine.deliver(&old));
    let ways = Ways { old, new, upgrade, downgrade };
    // Once to and fro, so that each try begins with the same files.
    machine.run(&ways.upgrade).ok();
    machine.run(&ways.downgrade).ok();
    machine
        .run(&format!("strace -qq -e signal=none -e trace='{STEPS}' -o /root/steps {}", ways.upgrade))
        .ok();
    machine.run(&ways.downgrade).ok();

    let steps = machine.read("/root/steps");
    let first =
        steps.lines().position(|step| step.starts_with("linkat(")).expect("the current binary is kept") + 1;
    let mut seen = Vec::new();
    // Until there is nothing left to be killed at.
    for step in (first..).filter(|step| step % 2 == remainder) {
        match killed_before(&machine, &ways, step) {
            Some(step) => seen.push(step),
            None => break,
        }
    }
    assert!(seen.len() >= 10, "only {seen:?} of these:\n{steps}");
    note(&format!("{name}: killed before {} steps: {}", seen.len(), seen.join(", ")));
}

/// One try; says where it was killed, or nothing when it was through before.
fn killed_before(machine: &Machine, ways: &Ways, step: usize) -> Option<String> {
    let inject = format!("strace -qq -e signal=none -e trace='{STEPS}' -o /root/killed");
    let inject = format!("{inject} -e inject='{STEPS}':signal=KILL:when={step}");
    let run = machine.run(&format!("{inject} {}", ways.upgrade));
    if run.code == 0 {
        return None;
    }
    assert_eq!(run.code, 137, "step {step}: {}", run.shown());
    let last = machine.run("tail -n 1 /root/killed").text().chars().take(90).collect::<String>();
    let at = format!("before step {step}, {last}");

    // Whole, one or the other, and serving.
    let in_place = machine.sha256(PLOYZD);
    assert!(in_place == ways.old.sha256 || in_place == ways.new.sha256, "{at}: {in_place} is neither");
    machine.until(&format!("the daemon serves, killed {at}"), |machine| {
        machine.run("curl -fsS -m 5 --unix-socket /run/ployz/ployz.sock http://machine/v1/machine").code == 0
    });

    // What is told is true.
    let status = machine.status();
    let (record, state) = (&status["last"]["Ok"][0], &status["last"]["Ok"][1]["state"]);
    let ended = record["outcome"].is_object();
    assert_eq!(state, if ended { "ended" } else { "interrupted" }, "{at}: {status}");
    let replaced = in_place == ways.new.sha256;
    let told = record["installation"] == "replaced";
    assert!(
        told || !replaced,
        "{at}: the new binary is in place, and the installation is told to be unchanged: {status}"
    );
    if !ended {
        assert_ne!(status["findings"], json!([]), "{at}: {status}");
    }

    // The next one makes it right, and the good release before it is kept.
    let repaired = machine.run(&ways.upgrade);
    assert!(repaired.code == 0, "{at}: {}", repaired.shown());
    machine.assert_runs("1.5.0", &ways.new.sha256);
    assert_eq!(machine.sha256("/usr/local/bin/ployzd.previous"), ways.old.sha256, "{at}: previous");
    assert_eq!(machine.inventory()["previous"]["version"], "1.4.0", "{at}");
    machine.assert_nothing_left();
    machine.run(&ways.downgrade).ok();
    let stage = record["stage"].as_str().unwrap_or("?");
    Some(format!("{stage} ({})", last.split('(').next().unwrap_or_default()))
}
