//! Ctrl-C, SIGTERM, SIGHUP, and nobody who reads any more: before the switch it is cancelled, after it it goes on.

use std::io;
use std::thread;
use std::time::{Duration, Instant};

use kit::Rule;
use nix::sys::signal::{Signal, kill, raise};
use nix::unistd::Pid;
use ployz::install::attempt::{Installation, Outcome, Record};
use ployz::install::events::{Event, What};

use crate::child::{At, installer, start};
use crate::world::{NONE, UNITS, World, alone, exact, script_that};

/// A world with 1.3.0 in place and 1.4.0 to be had, large enough to come in pieces.
fn world(alone: &crate::world::Alone) -> World {
    let world = World::new(alone);
    world.release("1.3.0");
    world.installed(&exact("1.3.0"));
    let mut bytes = script_that("", "1.4.0", UNITS);
    bytes.extend(b"# x\n".repeat(300_000));
    world.publish("1.4.0", bytes);
    world
}

/// The stage that begins, or the fact or progress in it.
fn is_at(event: &Event<'_>, at: &str) -> bool {
    match &event.what {
        What::Stage { stage, fact: None, .. } => stage.to_string() == at,
        What::Stage { stage, fact: Some(_), .. } => format!("{stage}, done") == at,
        What::Progress { .. } => at == "progress",
        What::Outcome { .. } => false,
    }
}

fn assert_cancelled(world: &World, record: &Record, by: &str, what: &str) {
    let Some(Outcome::Failed { reason, error, .. }) = &record.outcome else { panic!("{what}: {record:#?}") };
    assert_eq!(reason, "cancelled", "{what}: {error}");
    assert!(error.contains(by), "{what}: {error}");
    assert_eq!(record.installation, Installation::Unchanged, "{what}");
    assert_eq!(world.inventory()["current"]["version"], "1.3.0", "{what}");
    assert_eq!(world.left_over(), NONE, "{what}");
}

#[test]
fn a_signal_before_the_switch_cancels() {
    let alone = alone();
    for at in [
        "preparing",
        "acquiring",
        "progress",
        "acquiring, done",
        "verifying",
        "verifying, done",
        "preflight, done",
    ] {
        for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
            let world = world(&alone);
            let before = world.installation();
            let record = world.install_while(&exact("1.4.0"), &mut |event| {
                if is_at(event, at) {
                    raise(signal)?;
                }
                Ok(())
            });
            assert_cancelled(&world, &record.unwrap(), signal.as_str(), &format!("{signal} at {at}"));
            assert_eq!(world.installation(), before);
        }
    }
}

#[test]
fn a_signal_ends_a_download_and_a_preflight_at_once() {
    let alone = alone();
    for (hangs, begins) in [("download", 1), ("preflight", 2)] {
        let world = world(&alone);
        let stage = if hangs == "download" {
            world.server.rule(Rule::new("*.tar.gz").cut(1000, kit::How::Stall));
            "acquiring"
        } else {
            world.publish("1.4.0", script_that("sleep 600", "1.4.0", UNITS));
            "preflight"
        };
        // A process of its own: a signal is for all threads of a process.
        let mut child = start(&world, &installer("1.4.0", At::Say));
        let mut begun = 0;
        while begun < begins {
            let said = child.says();
            assert!(said["event"].is_string(), "{hangs}: {said}");
            begun += usize::from(said["stage"] == stage && said["fact"].is_null());
        }
        thread::sleep(Duration::from_millis(400));
        let sent = Instant::now();
        kill(Pid::from_raw(child.child.id().try_into().unwrap()), Signal::SIGTERM).unwrap();
        let mut said = child.says();
        while said["event"].is_string() {
            said = child.says();
        }
        assert!(sent.elapsed() < Duration::from_secs(15), "{hangs}: {:?}", sent.elapsed());
        let record: Record = serde_json::from_value(said).unwrap();
        assert_cancelled(&world, &record, "SIGTERM", hangs);
    }
}

#[test]
fn when_nobody_reads_any_more_it_is_cancelled_before_the_switch() {
    let alone = alone();
    for at in ["acquiring", "progress", "verifying", "preflight, done"] {
        let world = world(&alone);
        let before = world.installation();
        let record = world.install_while(&exact("1.4.0"), &mut |event| {
            if is_at(event, at) { Err(io::ErrorKind::BrokenPipe.into()) } else { Ok(()) }
        });
        assert_cancelled(&world, &record.unwrap(), "nobody reads the output any more", at);
        assert_eq!(world.installation(), before);
    }
}

#[test]
fn from_the_switch_on_neither_changes_the_outcome() {
    let alone = alone();
    for hurt in ["signal", "pipe", "pipe at the outcome"] {
        let world = world(&alone);
        let record = world.install_while(&exact("1.4.0"), &mut |event| {
            let outcome = matches!(event.what, What::Outcome { .. });
            match hurt {
                "signal" if is_at(event, "activating") => Ok(raise(Signal::SIGTERM)?),
                "pipe" if is_at(event, "activating") || outcome => Err(io::ErrorKind::BrokenPipe.into()),
                "pipe at the outcome" if outcome => Err(io::ErrorKind::BrokenPipe.into()),
                _ => Ok(()),
            }
        });
        let record = record.unwrap();
        assert!(matches!(record.outcome, Some(Outcome::Installed { .. })), "{hurt}: {record:#?}");
        assert_eq!(record.installation, Installation::Replaced, "{hurt}");
        assert_eq!(world.inventory()["current"]["version"], "1.4.0", "{hurt}");
        assert_eq!(world.left_over(), NONE, "{hurt}");
    }
}

#[test]
fn a_signal_that_came_before_is_heard_before_anything_is_replaced() {
    let alone = alone();
    let world = world(&alone);
    raise(Signal::SIGHUP).unwrap();
    match world.install(&exact("1.4.0")) {
        Err(refusal) => assert!(refusal.to_string().contains("cancelled by SIGHUP"), "{refusal}"),
        Ok(record) => assert_cancelled(&world, &record, "SIGHUP", "before"),
    }
    assert_eq!(world.inventory()["current"]["version"], "1.3.0");
}
