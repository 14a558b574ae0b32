//! Attempt records: durable before anything is done, bounded, read by everyone and written by the holder alone.

use std::fs;
use std::path::Path;

use ployz::install::admission::{Observed, observe};
use ployz::install::attempt::{Outcome, Record, State};
use ployz::install::events::What;
use ployz::install::records::{Entry, ids, read};
use ployz::install::status::status;
use serde_json::{Value, json};

use crate::world::{World, alone, exact, newest, snapshot};

fn fixture(name: &str) -> Value {
    let path = Path::new("tests/fixtures/records").join(name);
    serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
}

/// Puts a record into the world, and says where.
fn place(world: &World, record: &Value) -> std::path::PathBuf {
    fs::create_dir_all(world.host.attempts()).unwrap();
    let path = world.host.attempts().join(format!("{}.json", record["id"].as_str().unwrap()));
    fs::write(&path, record.to_string()).unwrap();
    path
}

#[test]
fn every_fixture_is_a_record_and_nothing_of_it_is_lost() {
    let mut seen = Vec::new();
    for entry in fs::read_dir("tests/fixtures/records").unwrap() {
        let path = entry.unwrap().path();
        let Entry::Record(record) = read(&path).unwrap() else { panic!("{path:?} is not understood") };
        let written = serde_json::to_value(&record).unwrap();
        let stored: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        for (field, value) in stored.as_object().unwrap() {
            assert_eq!(written[field], *value, "{field} of {path:?}");
        }
        seen.push(match record.outcome {
            None => "running",
            Some(Outcome::Succeeded { .. }) => "succeeded",
            Some(Outcome::Installed { .. }) => "installed",
            Some(Outcome::Failed { .. }) => "failed",
            Some(Outcome::Interrupted { .. }) => "interrupted",
        });
    }
    seen.sort_unstable();
    seen.dedup();
    assert_eq!(seen, ["failed", "installed", "interrupted", "running", "succeeded"]);
}

#[test]
fn the_record_is_durable_before_anything_is_fetched_and_names_each_stage_as_it_begins() {
    let alone = alone();
    let world = World::new(&alone);
    world.release("1.4.0");
    let mut seen = 0;
    let on_disk = |attempt: &str| {
        let path = world.host.attempts().join(format!("{attempt}.json"));
        let Entry::Record(record) = read(&path).unwrap() else { panic!("not a record") };
        record
    };
    let record = world.install_while(&exact("1.4.0"), &mut |event| {
        match &event.what {
            What::Stage { attempt, stage, .. } => {
                let record = on_disk(attempt);
                assert_eq!((&record.stage, record.outcome), (*stage, None));
                let State::Running = state(&world, attempt) else { panic!("not running at {stage}") };
                seen += 1;
            }
            What::Progress { attempt, .. } => assert_eq!(on_disk(attempt).stage.to_string(), "acquiring"),
            // Whoever is told that it ended finds it written, and may ask for the next one.
            What::Outcome { record } => {
                assert_eq!(on_disk(&record.id).outcome, record.outcome);
                assert_eq!(observe(&world.host), Observed::Free);
            }
        }
        Ok(())
    });
    assert!(record.unwrap().outcome.is_some() && seen > 8);
}

fn state(world: &World, attempt: &str) -> State {
    let (entry, state) = newest(world).unwrap().unwrap();
    assert!(matches!(entry, Entry::Record(record) if record.id == attempt));
    state
}

#[test]
fn an_open_record_is_closed_as_interrupted_by_the_next_attempt() {
    let alone = alone();
    let world = World::new(&alone);
    world.release("1.4.0");
    let mut of_another_boot = fixture("v1-running.json");
    of_another_boot["accepted_at"] = "2026-01-01T00:00:00Z".into();
    let mut of_this_boot = of_another_boot.clone();
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap().trim().replace('-', "");
    of_this_boot["id"] = "aa".repeat(16).into();
    of_this_boot["boot_id"] = boot.clone().into();
    let mut with_evidence = of_this_boot.clone();
    with_evidence["id"] = "bb".repeat(16).into();
    with_evidence["accepted_at"] = "2026-01-02T00:00:00Z".into();
    let paths = [&of_another_boot, &of_this_boot, &with_evidence].map(|record| place(&world, record));
    let exit = json!({"service_result": "oom-kill", "exit_code": "killed", "exit_status": "KILL"});
    fs::write(world.host.attempts().join(format!("{}.exit.json", "bb".repeat(16))), exit.to_string())
        .unwrap();

    // Before that, a reader derives the same.
    let derived = state(&world, &"bb".repeat(16));
    assert_eq!(derived, State::Interrupted { evidence: "its unit ended: oom-kill killed KILL".into() });

    let record = world.installed(&exact("1.4.0"));
    let restarted = format!("the Machine was restarted (boot 2a48 → {})", &boot[..4]);
    for (path, evidence) in paths.iter().zip([
        restarted.as_str(),
        "none: it ended without a word",
        "its unit ended: oom-kill killed KILL",
    ]) {
        let Entry::Record(closed) = read(path).unwrap() else { panic!("not a record") };
        let Some(Outcome::Interrupted { stage, evidence: found }) = &closed.outcome else {
            panic!("{closed:#?}")
        };
        assert_eq!((stage.to_string().as_str(), found.as_str()), ("preflight", evidence));
        assert!(closed.ended_at.is_some());
        let told = format!("attempt {} was interrupted at preflight: {evidence}", closed.id);
        assert!(record.warnings.contains(&told), "{record:#?}");
    }
}

#[test]
fn a_damaged_record_is_moved_aside_and_stops_nothing() {
    let alone = alone();
    for damage in ["", "{\"schema\":1", "\0\0\0\0", "[]", "{\"id\":5}"] {
        let world = World::new(&alone);
        world.release("1.4.0");
        let path = place(&world, &json!({"id": "cc".repeat(16)}));
        fs::write(&path, damage).unwrap();
        let looked = status(&world.host);
        let told = looked.last.clone().err().unwrap_or_default();
        assert!(
            told.contains(&"cc".repeat(16)) && told.contains("is not a record"),
            "{damage:?}: {looked:?}"
        );
        assert_eq!(fs::read_to_string(&path).unwrap(), damage, "a reader leaves it");

        let record = world.installed(&exact("1.4.0"));
        assert!(!path.exists());
        let aside: Vec<_> =
            world.attempts().into_iter().filter(|p| p.display().to_string().contains("damaged")).collect();
        assert_eq!(aside.len(), 1, "{damage:?}");
        assert_eq!(fs::read_to_string(&aside[0]).unwrap(), damage, "it is kept for who wants to look");
        assert!(record.warnings.iter().any(|text| text.contains("moved aside")), "{damage:?}: {record:#?}");
        assert_eq!(ids(&world.host).unwrap(), [record.id]);
    }
}

#[test]
fn a_record_of_a_newer_release_is_shown_and_left() {
    let alone = alone();
    let world = World::new(&alone);
    world.release("1.4.0");
    let mut newer = fixture("v1-running.json");
    newer["schema"] = 2.into();
    newer["accepted_at"] = json!({"a new": "form"});
    let path = place(&world, &newer);
    let before = fs::read_to_string(&path).unwrap();
    assert!(matches!(newest(&world), Ok(Some((Entry::Newer(_), State::Unknown { .. })))));
    world.installed(&exact("1.4.0"));
    assert_eq!(fs::read_to_string(&path).unwrap(), before);
}

#[test]
fn the_newest_thirty_two_are_kept() {
    let alone = alone();
    let world = World::new(&alone);
    world.release("1.4.0");
    let mut old = fixture("v1-failed.json");
    for day in 1..=40 {
        let id = format!("{day:032x}");
        old["id"] = id.clone().into();
        old["accepted_at"] = format!("2026-01-01T00:00:{day:02}Z").into();
        place(&world, &old);
        fs::write(world.host.attempts().join(format!("{id}.exit.json")), "{}").unwrap();
    }
    let record = world.installed(&exact("1.4.0"));
    let kept = ids(&world.host).unwrap();
    let newest = (0..31).map(|back| format!("{:032x}", 40 - back));
    assert_eq!(kept, [record.id].into_iter().chain(newest).collect::<Vec<_>>());
    let files = world.attempts().len() - 1;
    assert_eq!(files, 32 + 31, "records, and what units left of the same attempts");
}

#[test]
fn the_clock_does_not_order_attempts() {
    let alone = alone();
    let world = World::new(&alone);
    world.release("1.4.0");
    let mut of_the_future = fixture("v1-failed.json");
    of_the_future["accepted_at"] = "2100-01-01T00:00:00Z".into();
    of_the_future["sequence"] = 5.into();
    place(&world, &of_the_future);
    for sequence in [6, 7] {
        let record = world.installed(&exact("1.4.0"));
        assert_eq!(record.sequence, sequence);
        assert_eq!(ids(&world.host).unwrap()[0], record.id, "the newest is the one that came last");
    }
}

#[test]
fn readers_write_nothing() {
    let alone = alone();
    let world = World::new(&alone);
    world.release("1.4.0");
    world.installed(&exact("1.4.0"));
    place(&world, &fixture("v1-running.json"));
    fs::write(world.host.attempts().join("not-a-record.txt"), "x").unwrap();
    let before = snapshot(world.root());
    for _ in 0..2 {
        let _ = (status(&world.host), newest(&world), ids(&world.host));
        let _ = observe(&world.host);
    }
    assert_eq!(snapshot(world.root()), before);
    let empty = World::new(&alone);
    let before = snapshot(empty.root());
    let looked = status(&empty.host);
    assert!(looked.findings.contains(&"nothing is installed".to_owned()), "{looked:?}");
    assert_eq!(snapshot(empty.root()), before, "nor does looking make anything");
}

#[test]
fn a_record_that_can_not_be_written_stops_it_before_anything_is_done() {
    let alone = alone();
    let world = World::new(&alone);
    world.release("1.4.0");
    fs::create_dir_all(world.host.install_state()).unwrap();
    fs::write(world.host.attempts(), "a file").unwrap();
    let text = match world.install(&exact("1.4.0")) {
        Ok(record) => panic!("accepted: {record:#?}"),
        Err(refusal) => refusal.to_string(),
    };
    assert!(text.contains("exists and is not a directory"), "{text}");
    assert!(!world.host.installed().exists() && !world.host.lib().exists());
}

#[test]
fn a_record_is_small_whatever_is_said_in_it() {
    let alone = alone();
    let world = World::new(&alone);
    let noise = "head -c 300000 /dev/zero | tr '\\0' x >&2; exit 1";
    world.publish("1.4.0", crate::world::script_that(noise, "1.4.0", crate::world::UNITS));
    let record: Record = world.install(&exact("1.4.0")).unwrap();
    let length = fs::metadata(world.host.attempts().join(format!("{}.json", record.id))).unwrap().len();
    assert!(length < 16 * 1024, "{length} bytes");
    assert!(matches!(newest(&world), Ok(Some((Entry::Record(_), State::Ended)))));
}
