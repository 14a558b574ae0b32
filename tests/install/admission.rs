//! Admission: one installer at a time, no installer beside a mutation, everyone else told who; and the kernel lets go
//! of it when its holder dies.

use std::fs;

use jiff::Timestamp;
use ployz::install::admission::{
    Admission, AdmissionError, Busy, Holder, MutationAdmission, Observed, observe,
};
use ployz::install::events::Refusal;

use crate::child::{At, Role, installer, start};
use crate::world::{World, alone, exact, from_disk};

/// A world with a lock file, as the first installation leaves it.
fn world(alone: &crate::world::Alone) -> World {
    let world = World::new(alone);
    world.release("1.3.0");
    world.installed(&exact("1.3.0"));
    world
}

fn holder() -> Holder {
    Holder {
        attempt: "0d".repeat(16),
        kind: "install".into(),
        pid: std::process::id(),
        since: Timestamp::now(),
    }
}

fn busy<T: std::fmt::Debug>(taken: Result<T, AdmissionError>) -> Busy {
    match taken {
        Err(AdmissionError::Busy(busy)) => busy,
        other => panic!("not busy: {other:?}"),
    }
}

#[test]
fn many_installers_at_once_one_runs_and_the_others_name_it() {
    let alone = alone();
    let world = world(&alone);
    world.release("1.4.0");
    let mut first = start(&world, &installer("1.4.0", At::Park(2)));
    let event = first.says();
    let (attempt, pid) = (event["attempt"].as_str().unwrap().to_owned(), first.child.id());
    let role = installer("1.4.0", At::Nothing);
    let mut others: Vec<_> = (0..5).map(|_| start(&world, &role)).collect();
    for other in &mut others {
        let said = other.says();
        let text = said["busy"].as_str().unwrap_or_else(|| panic!("{said}"));
        assert!(text.contains(&attempt) && text.contains(&format!("(pid {pid})")), "{text}");
        let processes = said["processes"].as_array().unwrap();
        assert_eq!(processes.len(), 1, "{said}");
        assert_eq!(processes[0]["pid"], pid);
        assert!(processes[0]["executable"].as_str().unwrap().contains("install"), "{said}");
    }
    assert_eq!(world.inventory()["current"]["version"], "1.3.0");
    assert_eq!(
        world.attempts().iter().filter(|path| path.extension().is_some()).count(),
        2,
        "no record for who was busy"
    );
    drop(others);
    first.kill();
}

#[test]
fn of_many_that_start_together_each_succeeds_or_is_busy() {
    let alone = alone();
    let world = world(&alone);
    world.release("1.4.0");
    let role = installer("1.4.0", At::Nothing);
    let mut all: Vec<_> = (0..6).map(|_| start(&world, &role)).collect();
    let said: Vec<_> = all.iter_mut().map(super::child::Running::says).collect();
    let installed = said.iter().filter(|said| said["outcome"]["installed"].is_object()).count();
    let busy = said.iter().filter(|said| said["busy"].is_string()).count();
    assert!(installed >= 1 && installed + busy == 6, "{said:#?}");
    let replaced = said.iter().filter(|said| said["installation"] == "replaced").count();
    assert_eq!(replaced, 1, "those that came later found it done");
    assert_eq!(world.left_over(), crate::world::NONE);
}

#[test]
fn an_installer_and_a_mutation_refuse_each_other() {
    let alone = alone();
    let world = world(&alone);
    let published = world.release("1.4.0");
    let mutation = MutationAdmission::try_take(&world.host).unwrap();
    let another = MutationAdmission::try_take(&world.host).unwrap();
    assert_eq!(observe(&world.host), Observed::Mutating { doing: None });
    let seen = busy(Admission::try_take(&world.host, holder()));
    assert_eq!(seen.observed, Observed::Mutating { doing: None });
    assert!(seen.processes.iter().any(|process| process.pid == std::process::id()), "{seen:?}");
    let before = world.installation();
    match world.install(&from_disk("1.4.0", &published)) {
        Err(Refusal::Busy(busy)) => assert!(busy.what().contains("changed by its daemon"), "{}", busy.what()),
        other => panic!("not busy: {other:?}"),
    }
    assert_eq!(world.installation(), before);
    drop(mutation);
    busy(Admission::try_take(&world.host, holder()));
    drop(another);

    let admission = Admission::try_take(&world.host, holder()).unwrap();
    let expected = Observed::Installing { holder: Some(holder()) };
    let (Observed::Installing { holder: Some(seen) }, Observed::Installing { holder: Some(own) }) =
        (observe(&world.host), expected)
    else {
        panic!("not seen")
    };
    assert_eq!((seen.attempt, seen.kind, seen.pid), (own.attempt, own.kind, own.pid));
    let refused = busy(MutationAdmission::try_take(&world.host)).what();
    assert!(refused.contains(&"0d".repeat(16)) && refused.contains("install"), "{refused}");
    drop(admission);
    assert_eq!(observe(&world.host), Observed::Free);
    drop(MutationAdmission::try_take(&world.host).unwrap());
}

#[test]
fn it_is_free_the_moment_its_holder_is_killed() {
    let alone = alone();
    let world = world(&alone);
    for role in [Role::Holder, Role::Mutation, Role::Holder] {
        let mut child = start(&world, &role);
        assert_eq!(child.says(), "holds");
        let seen = observe(&world.host);
        match (&role, &seen) {
            (Role::Holder, Observed::Installing { holder: Some(holder) }) => {
                assert_eq!(holder.pid, child.child.id());
            }
            (Role::Mutation, Observed::Mutating { .. }) => {}
            _ => panic!("{role:?}: {seen:?}"),
        }
        assert!(matches!(Admission::try_take(&world.host, holder()), Err(AdmissionError::Busy(_))));
        child.kill();
        assert_eq!(observe(&world.host), Observed::Free, "{role:?}");
        drop(Admission::try_take(&world.host, holder()).unwrap());
    }
}

#[test]
fn looking_takes_nothing() {
    let alone = alone();
    let world = world(&alone);
    let inode =
        |world: &World| std::os::unix::fs::MetadataExt::ino(&fs::metadata(world.host.admission()).unwrap());
    let before = inode(&world);
    let mut child = start(&world, &Role::Holder);
    assert_eq!(child.says(), "holds");
    for _ in 0..100 {
        assert!(matches!(observe(&world.host), Observed::Installing { .. }));
    }
    child.kill();
    for _ in 0..100 {
        assert_eq!(observe(&world.host), Observed::Free);
        drop(Admission::try_take(&world.host, holder()).unwrap());
    }
    world.release("1.4.0");
    world.installed(&exact("1.4.0"));
    assert_eq!(inode(&world), before, "the file is never replaced");
}

#[test]
fn a_lock_file_that_is_not_ours_is_not_used() {
    let alone = alone();
    for kind in ["link", "hard link", "directory", "fifo"] {
        let world = World::new(&alone);
        let published = world.release("1.4.0");
        fs::create_dir_all(world.host.install_state()).unwrap();
        let (path, other) = (world.host.admission(), world.root().join("other"));
        fs::write(&other, "theirs").unwrap();
        match kind {
            "link" => std::os::unix::fs::symlink(&other, &path).unwrap(),
            "hard link" => fs::hard_link(&other, &path).unwrap(),
            "directory" => fs::create_dir(&path).unwrap(),
            _ => nix::unistd::mkfifo(&path, nix::sys::stat::Mode::S_IRWXU).unwrap(),
        }
        let refused = match world.install(&from_disk("1.4.0", &published)) {
            Ok(record) => panic!("{kind}: accepted: {record:#?}"),
            Err(refusal) => refusal.to_string(),
        };
        assert!(refused.contains("admission.lock"), "{kind}: {refused}");
        assert_eq!(fs::read_to_string(&other).unwrap(), "theirs", "{kind}");
        assert!(!world.host.installed().exists(), "{kind}");
    }
}
