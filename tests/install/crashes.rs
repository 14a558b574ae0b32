//! An installer that is killed: whatever it was about, what is installed is whole, the attempt is known to be
//! interrupted, and the next one needs nobody to clean up.

use std::fs;

use ployz::install::admission::{Observed, observe};
use ployz::install::attempt::{Installation, Outcome, State};
use ployz::install::records::{Entry, read};

use serde_json::Value;

use crate::child::{At, installer, start};
use crate::world::{NONE, World, alone, exact, newest, script};

#[test]
fn killed_at_any_event_and_asked_again() {
    let alone = alone();
    let mut killed = Vec::new();
    for park_at in 0.. {
        let world = World::new(&alone);
        world.release("1.3.0");
        world.installed(&exact("1.3.0"));
        world.release("1.4.0");
        let mut child = start(&world, &installer("1.4.0", At::Park(park_at)));
        let said = child.says();
        let Some(attempt) = said["attempt"].as_str() else {
            assert!(said["outcome"]["installed"].is_object(), "it came to its end: {said}");
            break;
        };
        let stage = said["stage"].as_str().unwrap_or("acquiring");
        let what = format!("killed at event {park_at}: {said}");
        assert!(matches!(newest(&world).unwrap(), Some((_, State::Running))), "{what}");
        child.kill();

        assert_eq!(observe(&world.host), Observed::Free, "{what}");
        let in_place = fs::read(world.host.installed()).unwrap();
        assert!(in_place == script("1.3.0") || in_place == script("1.4.0"), "{what}: neither of the two");
        let Some((Entry::Record(open), State::Interrupted { evidence })) = newest(&world).unwrap() else {
            panic!("{what}: not interrupted")
        };
        assert_eq!(
            (open.id.as_str(), open.stage.to_string().as_str(), open.outcome),
            (attempt, stage, None),
            "{what}"
        );
        assert_eq!(evidence, "none: it ended without a word");
        let switched = in_place == script("1.4.0");
        assert_eq!(open.installation == Installation::Replaced, switched, "{what}");

        let record = world.installed(&exact("1.4.0"));
        assert_eq!(fs::read(world.host.installed()).unwrap(), script("1.4.0"), "{what}");
        assert_eq!(world.left_over(), NONE, "{what}");
        let path = world.host.attempts().join(format!("{attempt}.json"));
        let Entry::Record(closed) = read(&path).unwrap() else { panic!("{what}") };
        assert!(matches!(closed.outcome, Some(Outcome::Interrupted { .. })), "{what}");
        assert_ne!(record.id, closed.id);
        killed.push(stage.to_owned());
    }
    killed.dedup();
    assert!(killed.ends_with(&["verifying".into(), "preflight".into(), "activating".into()]), "{killed:?}");
}

#[test]
fn cut_off_between_a_rename_and_its_record_the_disk_tells() {
    let alone = alone();
    for (in_place, installation) in [("1.3.0", Installation::Unchanged), ("1.4.0", Installation::Replaced)] {
        let world = World::new(&alone);
        world.release("1.5.0");
        let digest = |version| kit::release::sha256(&script(version));
        let mut record: Value =
            serde_json::from_slice(&fs::read("tests/fixtures/records/v1-running.json").unwrap()).unwrap();
        record["stage"] = "activating".into();
        record["from_digest"] = digest("1.3.0").into();
        record["target_digest"] = digest("1.4.0").into();
        fs::create_dir_all(world.host.attempts()).unwrap();
        let path = world.host.attempts().join(format!("{}.json", record["id"].as_str().unwrap()));
        fs::write(&path, record.to_string()).unwrap();
        fs::write(world.host.installed(), script(in_place)).unwrap();

        let Some((Entry::Record(open), State::Interrupted { .. })) = newest(&world).unwrap() else {
            panic!("not interrupted")
        };
        assert_eq!(open.installation, installation, "as a reader derives it");
        world.installed(&exact("1.5.0"));
        let Entry::Record(closed) = read(&path).unwrap() else { panic!("not a record") };
        assert_eq!(closed.installation, installation, "as the next attempt closes it");
    }
}

#[test]
fn what_earlier_attempts_left_is_swept_and_what_is_in_use_is_not() {
    let alone = alone();
    let world = World::new(&alone);
    world.release("1.4.0");
    let host = &world.host;
    let gone = [
        host.staging().join("ee".repeat(16)).join("checksums.txt"),
        host.staging().join("stray").join("x"),
        host.own_copies().join("4194304.0123abcd").join("ployzd"),
        host.own_copies().join("nonsense").join("ployzd"),
        host.bin().join(format!(".ployzd.{}", "ee".repeat(16))),
        host.bin().join(format!(".ployzd.previous.{}", "ee".repeat(16))),
    ];
    let kept = [
        host.own_copies().join(format!("{}.0123abcd", std::process::id())).join("ployzd"),
        host.lib().join("bootstrap/abcdef/ployzd"),
        host.bin().join("ployzd.moved"),
        host.bin().join(".profile"),
    ];
    for path in gone.iter().chain(&kept) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "x").unwrap();
    }
    world.installed(&exact("1.4.0"));
    for path in &gone {
        assert!(!path.exists(), "{path:?}");
    }
    for path in &kept {
        assert!(path.exists(), "{path:?}");
    }
}
