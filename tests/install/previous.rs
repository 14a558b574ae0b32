//! The one retained binary: the last release that was confirmed before the current one.

use std::fs;
use std::os::unix::fs::MetadataExt;

use serde_json::Value;

use crate::world::{UNITS, World, alone, exact, script, script_that};

/// The version that `installed.json` has for the retained binary, after a look that they are of one mind.
fn previous(world: &World) -> Option<String> {
    let described = &world.inventory()["previous"];
    match fs::read(world.host.previous()) {
        Err(_) => {
            assert_eq!(*described, Value::Null, "a description of nothing");
            None
        }
        Ok(bytes) => {
            if *described != Value::Null {
                assert_eq!(described["sha256"], kit::release::sha256(&bytes));
            }
            Some(described["version"].as_str().unwrap_or("not described").to_owned())
        }
    }
}

#[test]
fn only_what_was_confirmed_is_kept() {
    let alone = alone();
    let world = World::new(&alone);
    let install = |target: &str| {
        world.release(target);
        world.installed(&exact(target));
        previous(&world)
    };
    assert_eq!(install("1.1.0"), None, "there was nothing before");
    assert_eq!(install("1.2.0"), None, "1.1.0 was never seen to run");
    world.confirm();
    assert_eq!(install("1.3.0").as_deref(), Some("1.2.0"));
    assert_eq!(install("1.4.0").as_deref(), Some("1.2.0"), "a bad release does not push a good one out");
    world.confirm();
    assert_eq!(install("1.4.0").as_deref(), Some("1.2.0"), "nothing was replaced");
    assert_eq!(install("1.5.0").as_deref(), Some("1.4.0"));
    assert_eq!(fs::read(world.host.previous()).unwrap(), script("1.4.0"));
    assert_eq!(fs::metadata(world.host.previous()).unwrap().mode() & 0o7777, 0o755);
}

#[test]
fn other_bytes_of_the_same_version_replace_it() {
    let alone = alone();
    let world = World::new(&alone);
    let bytes = |note: &str| script_that(&format!("# {note}"), "1.4.0", UNITS);
    let install = |note: &str| {
        world.publish("1.4.0", bytes(note));
        let record = world.installed(&exact("1.4.0"));
        assert_eq!(record.switched, [world.host.installed().display().to_string()], "{note}");
        assert_eq!(fs::read(world.host.installed()).unwrap(), bytes(note));
    };
    world.publish("1.4.0", bytes("first"));
    world.installed(&exact("1.4.0"));
    install("second");
    assert_eq!(previous(&world), None);
    world.confirm();
    install("third");
    assert_eq!(previous(&world).as_deref(), Some("1.4.0"));
    assert_eq!(fs::read(world.host.previous()).unwrap(), bytes("second"));
}

#[test]
fn what_is_the_previous_one_already_stays_it() {
    let alone = alone();
    let world = World::new(&alone);
    world.release("1.1.0");
    world.installed(&exact("1.1.0"));
    world.confirm();
    // As a crash between the two renames leaves it: one file under both names.
    fs::hard_link(world.host.installed(), world.host.previous()).unwrap();
    world.release("1.2.0");
    world.installed(&exact("1.2.0"));
    assert_eq!(fs::read(world.host.previous()).unwrap(), script("1.1.0"));
    assert_eq!(fs::read(world.host.installed()).unwrap(), script("1.2.0"));
    assert_eq!(fs::metadata(world.host.previous()).unwrap().nlink(), 1);
    assert_eq!(previous(&world).as_deref(), Some("1.1.0"), "and is described");
}

#[test]
fn a_binary_that_nobody_described_is_kept_only_when_there_is_nothing_better() {
    let alone = alone();
    let world = World::new(&alone);
    fs::write(world.host.installed(), "by hand").unwrap();
    world.release("1.1.0");
    let record = world.installed(&exact("1.1.0"));
    assert!(
        record.warnings.iter().any(|text| text.contains("not what installed.json describes")),
        "{record:#?}"
    );
    assert_eq!(record.from, None);
    assert_eq!(fs::read(world.host.previous()).unwrap(), b"by hand");
    assert_eq!(previous(&world).as_deref(), Some("not described"));

    world.confirm();
    world.release("1.2.0");
    world.installed(&exact("1.2.0"));
    fs::remove_file(world.host.installed()).unwrap();
    fs::write(world.host.installed(), "by hand again").unwrap();
    world.release("1.3.0");
    world.installed(&exact("1.3.0"));
    assert_eq!(fs::read(world.host.previous()).unwrap(), script("1.1.0"), "1.1.0 was seen to run");
}

#[test]
fn a_damaged_description_describes_nothing_and_is_said() {
    let alone = alone();
    let world = World::new(&alone);
    world.release("1.1.0");
    world.installed(&exact("1.1.0"));
    let disabled = world.host.admin_units().join("multi-user.target.wants/ployz.service");
    fs::remove_file(&disabled).unwrap();
    fs::write(world.host.installed_json(), "{\"schema\":1,").unwrap();
    let record = world.installed(&exact("1.1.0"));
    let said =
        |text: &String| ["installed.json", "damaged", "moved aside"].iter().all(|word| text.contains(word));
    assert!(record.warnings.iter().any(said), "{record:#?}");
    assert_eq!(record.switched, Vec::<String>::new(), "the file on disk decides");
    assert_eq!(world.inventory()["current"]["version"], "1.1.0");
    assert!(!disabled.is_symlink(), "what an operator disabled is not new");
    let kept = crate::world::snapshot(&world.host.lib()).into_keys();
    assert!(kept.into_iter().any(|path| path.display().to_string().contains("installed.json.damaged")));
}
