//! Filesystems that can't hold an installation: named before anything is fetched, all at once; and one that turns out
//! to be too small. They are real mounts, in a namespace in which an ordinary user is root.

use kit::release::{Archive, Release};
use serde_json::{Value, json};

use crate::child::{At, installer, start_under};
use crate::world::{Alone, World, alone, script};

/// What an installation of 1.4.0 comes to under these mounts.
fn installed_under(alone: &Alone, mounts: &str, archive: Archive) -> (World, Value) {
    let world = World::new(alone);
    std::fs::create_dir_all(world.host.lib()).unwrap();
    std::fs::create_dir_all(world.host.install_state()).unwrap();
    Release::new("1.4.0").archive(archive).publish(world.site()).unwrap();
    let tmpfs = "tmpfs() { mount -t tmpfs -o mode=755,$2 tmpfs \"$root/$1\"; }";
    let mut child = start_under(&world, &installer("1.4.0", At::Nothing), &format!("{tmpfs}\n{mounts}"));
    let said = child.says();
    assert!(!said.is_null(), "no user namespaces here? look at: unshare --user --map-root-user --mount true");
    (world, said)
}

fn good() -> Archive {
    Archive::new().file("ployzd", script("1.4.0"))
}

#[test]
fn what_can_not_hold_it_is_named_before_anything_is_fetched() {
    let alone = alone();
    let (noexec, read_only, full) = (
        "is mounted noexec, so what is installed there can't run",
        "is mounted read-only",
        "MiB free, and 88 MiB are needed",
    );
    for (mounts, expected) in [
        ("tmpfs usr/local/bin noexec", &[("usr/local/bin", noexec)][..]),
        ("tmpfs usr/local/bin ro", &[("usr/local/bin", read_only)]),
        ("tmpfs usr/local/bin size=8m", &[("usr/local/bin", full)]),
        ("tmpfs usr/local/bin ro,noexec", &[("usr/local/bin", read_only), ("usr/local/bin", noexec)]),
        (
            "tmpfs usr/local/bin noexec\ntmpfs usr/local/lib ro",
            &[("usr/local/bin", noexec), ("usr/local/lib", read_only)],
        ),
    ] {
        let (world, said) = installed_under(&alone, mounts, good());
        let failed = &said["outcome"]["failed"];
        assert_eq!(
            (&failed["reason"], &said["installation"]),
            (&json!("host"), &json!("unchanged")),
            "{said:#}"
        );
        let text = format!("{}\n{}", failed["error"], failed["causes"]);
        for (place, problem) in expected {
            let place = world.root().join(place).display().to_string();
            assert!(text.contains(&place) && text.contains(problem), "{mounts}: {place} {problem}: {text}");
        }
        let help = failed["help"].to_string();
        assert!(help.contains("mount -o remount") || help.contains("df -h"), "{mounts}: {help}");
        assert!(!world.server.settled().iter().any(|asked| asked.path.ends_with(".tar.gz")), "{mounts}");
        assert_eq!(said["left over"], json!([]), "{mounts}");
    }
}

#[test]
fn a_filesystem_that_fills_up_is_named_and_cleaned() {
    let alone = alone();
    // Little as an archive, and more than there is room for: nobody can know before.
    let archive = Archive::new().zeros("ployzd", 110 << 20);
    let (_world, said) = installed_under(&alone, "tmpfs usr/local/bin size=96m", archive);
    let failed = &said["outcome"]["failed"];
    assert_eq!((&failed["reason"], &said["installation"]), (&json!("disk"), &json!("unchanged")), "{said:#}");
    let error = failed["error"].as_str().unwrap();
    assert!(error.contains("usr/local/bin/.ployzd.") && error.contains("No space left on device"), "{error}");
    assert_eq!(said["left over"], json!([]));
}

#[test]
fn without_a_place_for_records_nothing_is_accepted() {
    let alone = alone();
    let (world, said) = installed_under(&alone, "tmpfs var/lib/ployz-install ro", good());
    let refused = said.as_str().unwrap_or_else(|| panic!("accepted: {said:#}"));
    assert!(refused.contains("ployz-install") && refused.contains("Read-only file system"), "{refused}");
    assert!(!world.host.installed().exists());
}
