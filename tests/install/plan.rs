//! What an installation would change, said without a lock and without a write.

use ployz::install::events::Refusal;
use ployz::install::plan::{Plan, plan};
use ployz::install::release::Channel;
use ployz::install::{Request, Wanted};

use crate::child::{Role, start};
use crate::world::{OWN, PLOYZD, World, alone, channel, exact, from_disk, request, snapshot, version};

/// Plans, and checks that this left no trace.
fn planned(world: &World, request: &Request) -> Result<Plan, Refusal> {
    let before = snapshot(world.root());
    let plan = plan(&world.host, request, &world.interrupt);
    assert_eq!(snapshot(world.root()), before);
    plan
}

/// Files and directories; there are no accounts under a temporary root.
fn changes(plan: &Plan) -> Vec<String> {
    let files = plan.changes.iter().filter(|change| change.what.starts_with('/'));
    files.map(|change| format!("{} {}", change.what, change.how)).collect()
}

#[test]
fn what_would_be_written_is_said_and_not_written() {
    let alone = alone();
    let world = World::new(&alone);
    let published = world.release("1.4.0");
    let installed = world.host.installed().display().to_string();
    for request in [exact("1.4.0"), channel(Channel::Stable), from_disk("1.4.0", &published)] {
        let plan = planned(&world, &request).unwrap();
        assert_eq!((plan.target, plan.from), (version("1.4.0"), None));
        assert!(changes(&plan).contains(&format!("{installed} written: 1.4.0")), "{plan:?}");
    }
    world.installed(&exact("1.4.0"));
    world.confirm();
    world.release("1.5.0");
    let plan = planned(&world, &exact("1.5.0")).unwrap();
    assert_eq!((plan.target, plan.from), (version("1.5.0"), Some(version("1.4.0"))));
    let said = changes(&plan);
    assert!(said.contains(&format!("{installed} replaced: 1.4.0 by 1.5.0")), "{said:?}");
    let previous = world.host.previous().display().to_string();
    assert!(said.contains(&format!("{previous} the current release, kept")), "{said:?}");
    world.server.forget();
    planned(&world, &exact("1.5.0")).unwrap();
    assert!(
        !world.server.settled().iter().any(|asked| asked.path.ends_with(".tar.gz")),
        "no archive is fetched"
    );
}

#[test]
fn what_is_in_place_would_not_change() {
    let alone = alone();
    let world = World::new(&alone);
    world.publish(OWN, std::fs::read(PLOYZD).unwrap());
    world.release("1.4.0");
    let own = Request { own_version: version(OWN), ..request(Wanted::Channel(Channel::Stable)) };
    world.installed(&own);
    assert_eq!(changes(&planned(&world, &own).unwrap()), Vec::<String>::new());
    assert_eq!(changes(&planned(&world, &exact(OWN)).unwrap()), Vec::<String>::new());
    // A release whose units are others than those of whoever looks.
    world.installed(&exact("1.4.0"));
    let plan = planned(&world, &exact("1.4.0")).unwrap();
    assert_eq!(changes(&plan), Vec::<String>::new(), "{plan:?}");
}

#[test]
fn what_would_be_refused_is_refused() {
    let alone = alone();
    let world = World::new(&alone);
    let published = world.release("1.4.0");
    let refused = |request: &Request| planned(&world, request).unwrap_err().to_string();
    assert!(refused(&exact("1.9.0")).contains("does not exist (status 404)"));
    std::fs::write(&published.archive, "other bytes").unwrap();
    assert!(refused(&from_disk("1.4.0", &published)).contains("and checksums.txt says"));
    std::fs::write(published.directory.join("checksums.txt"), "").unwrap();
    assert!(refused(&from_disk("1.4.0", &published)).contains("has no line for"));
    assert!(refused(&exact("1.4.0")).contains("has no line for"));
    world.settings_text("{");
    assert!(refused(&exact("1.4.0")).contains("install.json"));
}

#[test]
fn it_may_be_asked_while_another_installs() {
    let alone = alone();
    let world = World::new(&alone);
    let published = world.release("1.4.0");
    let mut child = start(&world, &Role::Holder);
    assert_eq!(child.says(), "holds");
    let plan = planned(&world, &from_disk("1.4.0", &published)).unwrap();
    let busy = plan.notes.iter().find(|note| note.contains("now it would be refused"));
    assert!(busy.is_some_and(|note| note.contains(&"f0".repeat(16))), "{plan:?}");
    child.kill();
}
