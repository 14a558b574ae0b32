//! The ways to ask: an archive that is here, an exact version, a channel; and asking again.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use ployz::install::attempt::{Installation, Outcome, Requested, State};
use ployz::install::records::{Entry, read};
use ployz::install::release::Channel;
use ployz::install::{Request, Wanted};
use serde_json::Value;

use crate::world::{
    NONE, NONE_SWITCHED, OWN, PLOYZD, World, alone, channel, exact, from_disk, newest, request, script,
    script_that, version,
};

fn real() -> Vec<u8> {
    fs::read(PLOYZD).unwrap()
}

#[test]
fn the_real_binary_by_archive_by_version_and_by_channel() {
    let alone = alone();
    let bytes = real();
    let digest = kit::release::sha256(&bytes);
    let site = World::new(&alone);
    let published = site.publish(OWN, &bytes);
    let own = Request { own_version: version(OWN), ..request(Wanted::Channel(Channel::Stable)) };
    for (name, request, requested) in [
        ("archive", from_disk(OWN, &published), Requested::Exact(version(OWN))),
        ("version", exact(OWN), Requested::Exact(version(OWN))),
        ("channel", own, Requested::Channel(Channel::Stable)),
    ] {
        let world = World::new(&alone);
        let urls = serde_json::json!({
            "releases": site.server.url() + "/releases/download", "channels": site.server.url(),
        });
        world.settings(&urls);
        let record = world.installed(&request);
        let outcome = Outcome::Installed { version: version(OWN), sha256: digest.clone() };
        assert_eq!((record.requested, record.outcome.as_ref()), (requested, Some(&outcome)), "{name}");
        assert_eq!((record.target, record.from), (Some(version(OWN)), None), "{name}");
        assert_eq!(record.installation, Installation::Replaced, "{name}");
        assert_eq!(record.target_digest.as_ref(), Some(&digest), "{name}");
        assert_is_installed(&world, &bytes, &published.sha256, &record.id);
        let units = ployz::install::units::shipped().into_iter().map(|unit| unit.name).collect::<Vec<_>>();
        let units = units.iter().map(|unit| world.host.unit(unit));
        let switched =
            [world.host.installed()].into_iter().chain(units).map(|path| path.display().to_string());
        assert_eq!(record.switched, switched.collect::<Vec<_>>(), "{name}");
        assert_told(&world, &record.id);
    }
}

/// Checks every file that an installation of the real binary makes.
fn assert_is_installed(world: &World, bytes: &[u8], archive: &str, attempt: &str) {
    let host = &world.host;
    let meta = fs::symlink_metadata(host.installed()).unwrap();
    assert_eq!((meta.mode() & 0o7777, meta.nlink()), (0o755, 1));
    assert!(fs::read(host.installed()).unwrap() == bytes, "other bytes");
    for (unit, target) in [("ployz.socket", "sockets.target"), ("ployz.service", "multi-user.target")] {
        let shipped = fs::read(Path::new("hardening").join(unit)).unwrap();
        assert!(fs::read(host.unit(unit)).unwrap() == shipped, "{unit}");
        assert_eq!(fs::metadata(host.unit(unit)).unwrap().mode() & 0o7777, 0o644);
        let link = host.admin_units().join(format!("{target}.wants")).join(unit);
        let leads_to = fs::read_link(link).unwrap();
        assert_eq!(leads_to, Path::new("/usr/local/lib/systemd/system").join(unit));
    }
    assert_eq!(fs::read(host.sysusers()).unwrap(), fs::read("hardening/sysusers.conf").unwrap());
    let inventory = world.inventory();
    let current = &inventory["current"];
    assert_eq!((&current["version"], &current["attempt"]), (&OWN.into(), &attempt.into()));
    assert_eq!(current["sha256"], kit::release::sha256(bytes));
    assert_eq!((&current["archive_sha256"], &current["confirmed"]), (&archive.into(), &false.into()));
    assert_eq!(inventory["previous"], Value::Null);
    assert!(!host.previous().exists());
    assert_eq!(world.left_over(), NONE);
}

/// Checks what was told: each stage in its order, the outcome last, and the record as it is on disk.
fn assert_told(world: &World, attempt: &str) {
    let told = world.told.borrow();
    let stages = told.iter().filter(|event| event["event"] == "stage" && event["fact"].is_null());
    let stages: Vec<_> = stages.map(|event| event["stage"].as_str().unwrap()).collect();
    let order = ["preflight", "preparing", "acquiring", "verifying", "preflight", "activating"];
    assert_eq!(stages.iter().filter(|stage| **stage != "accepted").copied().collect::<Vec<_>>(), order);
    let (last, before) = told.split_last().unwrap();
    assert_eq!(last["event"], "outcome");
    assert!(before.iter().all(|event| event["event"] != "outcome" && event["attempt"] == attempt));
    assert!(told.iter().all(|event| event["schema"] == 1 && event["at"].is_string()));
    let on_disk = fs::read(world.host.attempts().join(format!("{attempt}.json"))).unwrap();
    assert_eq!(last["record"], serde_json::from_slice::<Value>(&on_disk).unwrap());
    let Ok(Some((Entry::Record(record), State::Ended))) = newest(world) else { panic!("no record") };
    assert_eq!(record.id, attempt);
}

#[test]
fn a_second_time_replaces_nothing_and_fetches_no_archive() {
    let alone = alone();
    let world = World::new(&alone);
    let published = world.release("1.4.0");
    let first = world.installed(&exact("1.4.0"));
    let before = world.installation();
    world.server.forget();
    for request in [exact("1.4.0"), channel(Channel::Stable), from_disk("1.4.0", &published)] {
        let record = world.installed(&request);
        assert_ne!(record.id, first.id);
        assert_eq!((record.installation, record.from), (Installation::Unchanged, Some(version("1.4.0"))));
        assert_eq!(record.switched, NONE_SWITCHED);
        assert_eq!(world.installation(), before, "inodes, times and contents are the same");
        assert_eq!(world.left_over(), NONE);
    }
    let paths: Vec<_> = world.server.settled().into_iter().map(|request| request.path).collect();
    let checksums = "/releases/download/v1.4.0/checksums.txt";
    assert_eq!(paths, [checksums, "/v1/stable", checksums]);
    assert_eq!(world.inventory()["previous"], Value::Null);
}

#[test]
fn what_was_changed_by_hand_is_put_right() {
    let alone = alone();
    let world = World::new(&alone);
    world.release("1.4.0");
    world.installed(&exact("1.4.0"));
    let unit = world.host.unit("ployz.service");
    let link = world.host.admin_units().join("multi-user.target.wants/ployz.service");
    let installed = world.host.installed();
    let good = fs::read(&unit).unwrap();

    fs::write(&unit, "[Service]\nExecStart=/bin/true\n").unwrap();
    fs::remove_file(&link).unwrap();
    let record = world.installed(&exact("1.4.0"));
    assert_eq!(record.switched, [unit.display().to_string()]);
    assert_eq!(fs::read(&unit).unwrap(), good);
    assert!(
        !link.exists() && fs::symlink_metadata(&link).is_err(),
        "what an operator disabled stays disabled"
    );

    fs::set_permissions(&installed, fs::Permissions::from_mode(0o700)).unwrap();
    world.installed(&exact("1.4.0"));
    assert_eq!(fs::metadata(&installed).unwrap().mode() & 0o7777, 0o755, "a mode is put right");

    fs::write(&installed, "damaged").unwrap();
    let record = world.installed(&exact("1.4.0"));
    assert_eq!(record.switched, [installed.display().to_string()]);
    assert_eq!(fs::read(&installed).unwrap(), script("1.4.0"));
    assert!(
        record.warnings.iter().any(|text| text.contains("not what installed.json describes")),
        "{record:#?}"
    );
}

#[test]
fn another_release_brings_its_units_and_an_older_one_is_warned_of() {
    let alone = alone();
    let world = World::new(&alone);
    world.release("1.5.0");
    world.installed(&exact("1.5.0"));
    let units = r#"[{"name":"ployz.service","content":"[Service]\nExecStart=/usr/local/bin/ployzd daemon\n# older\n[Install]\nWantedBy=multi-user.target\n","enable":true,"start":true},{"name":"ployz-new.service","content":"[Install]\nWantedBy=multi-user.target\n","enable":true,"start":true}]"#;
    world.publish("1.4.0", script_that("", "1.4.0", units));
    let record = world.installed(&exact("1.4.0"));
    assert_eq!((record.from, record.target), (Some(version("1.5.0")), Some(version("1.4.0"))));
    let warned = |text: &str| record.warnings.iter().any(|warning| warning.contains(text));
    assert!(warned("1.4.0 is older than 1.5.0: older software may not understand"), "{record:#?}");
    assert!(fs::read_to_string(world.host.unit("ployz.service")).unwrap().contains("# older"));
    assert!(world.host.admin_units().join("multi-user.target.wants/ployz-new.service").is_symlink());
    let units = world.inventory()["units"].to_string();
    assert!(units.contains("ployz.service") && units.contains("ployz-new.service"), "{units}");
}

#[test]
fn any_available_version_may_be_asked_for() {
    let alone = alone();
    let world = World::new(&alone);
    for target in ["1.4.0", "1.9.0", "3.0.0", "2.0.0-beta.1", "0.1.0", "1.4.0"] {
        world.release(target);
        let record = world.installed(&exact(target));
        assert_eq!(
            record.target,
            Some(version(target)),
            "no steps in between, no list of what may follow what"
        );
        assert_eq!(fs::read(world.host.installed()).unwrap(), script(target));
    }
}

#[test]
fn a_label_is_recorded_and_chooses_nothing() {
    let alone = alone();
    let world = World::new(&alone);
    let published = world.release("1.4.0");
    kit::release::point(world.site(), "stable", "1.9.0").unwrap();
    let request = Request { label: Some(Channel::Stable), ..from_disk("1.4.0", &published) };
    let record = world.installed(&request);
    assert_eq!(
        (record.requested, record.target),
        (Requested::Channel(Channel::Stable), Some(version("1.4.0")))
    );
    assert!(world.server.requests().is_empty(), "nothing was asked of the source");
}

#[test]
fn state_configuration_and_what_is_not_ours_stays_as_it_is() {
    let alone = alone();
    let world = World::new(&alone);
    let host = &world.host;
    let ours_to_keep = [
        host.state().join("identity.json"),
        host.state().join("pairing/credential"),
        host.admin_units().join("ployz.service.d/override.conf"),
        host.units().join("other.service"),
        host.bin().join("other"),
        host.lib().join("bootstrap/x/ployzd"),
    ];
    for path in &ours_to_keep {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, path.display().to_string()).unwrap();
    }
    let look = || ours_to_keep.each_ref().map(|path| crate::world::snapshot(path));
    let (settings, kept) = (fs::read(host.settings()).unwrap(), look());
    for target in ["1.4.0", "1.5.0", "1.5.0"] {
        world.release(target);
        world.installed(&exact(target));
    }
    assert_eq!((look(), fs::read(host.settings()).unwrap()), (kept, settings));
}

#[test]
fn directories_that_are_missing_are_made() {
    let alone = alone();
    let world = World::new(&alone);
    world.release("1.4.0");
    fs::remove_dir_all(world.root().join("usr")).unwrap();
    world.installed(&exact("1.4.0"));
    for dir in [world.host.bin(), world.host.lib(), world.host.units()] {
        assert_eq!(fs::metadata(&dir).unwrap().mode() & 0o7777, 0o755, "{dir:?}");
    }
}

#[test]
fn a_record_on_disk_is_the_one_that_was_returned() {
    let alone = alone();
    let world = World::new(&alone);
    world.release("1.4.0");
    let record = world.installed(&exact("1.4.0"));
    let path = world.host.attempts().join(format!("{}.json", record.id));
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o7777, 0o640);
    assert_eq!(read(&path).unwrap(), Entry::Record(Box::new(record)));
}
