//! Hostile archives, each with the right checksum: refused by name, before a byte lands.

use kit::release::{Archive, Gzip, Member, Release};

use crate::world::{World, alone, exact, from_disk, script};

fn good() -> Archive {
    Archive::new().file("ployzd", script("1.4.0"))
}

/// What is in the archive, and a part of what is said of it.
fn hostile() -> Vec<(&'static str, Archive, &'static str)> {
    let long = "d/".repeat(120) + "ployzd";
    let setuid = |mode| Archive::new().file_with_mode("ployzd", mode, script("1.4.0"));
    let member = |kind: u8| Archive::new().member(&Member::new("ployzd", kind), []);
    vec![
        ("no ployzd", Archive::new().file("other", "x"), "it holds 0 files named ployzd"),
        ("empty", Archive::new(), "it holds 0 files named ployzd"),
        ("two", good().file("ployzd", "x"), "it holds 2 files named ployzd"),
        ("only in a directory", Archive::new().file("bin/ployzd", "x"), "it holds 0 files named ployzd"),
        ("absolute", good().file("/etc/cron.d/x", "x"), r#""/etc/cron.d/x" is not a clean relative name"#),
        ("absolute ployzd", Archive::new().file("/ployzd", "x"), "is not a clean relative name"),
        ("climbs", good().file("../../bin/sh", "x"), r#""../../bin/sh" is not a clean"#),
        ("climbs inside", good().file("a/../../x", "x"), "is not a clean relative name"),
        ("dot", Archive::new().file("./ployzd", "x"), "is not a clean relative name"),
        ("no name", good().file("", "x"), "is not a clean relative name"),
        ("double slash", good().file("a//b", "x"), "is not a clean relative name"),
        ("line end in a name", good().file("a\nb", "x"), "is not a clean relative name"),
        ("escape in a name", good().file("a\u{1b}[2J", "x"), "is not a clean relative name"),
        (
            "not text",
            good().member(&Member::new(b"\xff\xfe".as_slice(), b'0'), []),
            "not a clean relative name",
        ),
        ("symlink", good().symlink("also", "/etc/passwd"), r#""also" is not a regular file (Symlink)"#),
        (
            "ployzd is a symlink",
            Archive::new().symlink("ployzd", "/bin/sh"),
            "is not a regular file (Symlink)",
        ),
        ("symlink, then through it", Archive::new().symlink("d", "/etc").file("d/x", "x"), "(Symlink)"),
        ("hard link", good().hard_link("also", "/etc/shadow"), r#""also" is not a regular file (Link)"#),
        ("ployzd is a hard link", Archive::new().hard_link("ployzd", "/bin/sh"), "(Link)"),
        ("device", good().device("null"), r#""null" is not a regular file (Char)"#),
        ("block device", good().member(&Member::new("sda", b'4'), []), "(Block)"),
        ("fifo", good().fifo("pipe"), r#""pipe" is not a regular file (Fifo)"#),
        ("directory", Archive::new().directory("d").file("ployzd", "x"), "is not a regular file (Directory)"),
        ("sparse", member(b'S'), "is not a regular file (GNUSparse)"),
        ("contiguous", member(b'7'), "is not a regular file (Continuous)"),
        ("of no known type", member(b'Z'), "is not a regular file"),
        ("setuid", setuid(0o4755), r#""ployzd" has mode 4755"#),
        ("setgid", setuid(0o2755), r#""ployzd" has mode 2755"#),
        ("sticky", setuid(0o1755), r#""ployzd" has mode 1755"#),
        ("long name, GNU", good().file_with_gnu_name(&long, "x"), "is not a regular file (GNULongName)"),
        (
            "long name, pax",
            good().file_with_pax_name("../../x", "fine", "x"),
            "is not a regular file (XHeader)",
        ),
        ("ployzd by pax", Archive::new().file_with_pax_name("ployzd", "fine", "x"), "(XHeader)"),
        ("pax size", Archive::new().pax(&[("size", "9")]).file("ployzd", "x"), "(XHeader)"),
        ("gibibytes of zeros", good().zeros("zeros", 10 << 30), "it unpacks to more than 134217728 bytes"),
        ("zeros as ployzd", Archive::new().zeros("ployzd", 10 << 30), "more than 134217728 bytes"),
        ("cut off", good().gzip(Gzip::Truncated(40)), "it can't be unpacked"),
        ("cut off in the file", good().without_end().gzip(Gzip::Truncated(20)), "it can't be unpacked"),
        ("bytes after it", good().gzip(Gzip::TrailingGarbage(100)), "bytes follow its end"),
        ("two parts", good().gzip(Gzip::TwoMembers), "refusing the archive"),
        ("wrong check sum", good().gzip(Gzip::BadChecksum), "it can't be unpacked"),
        ("wrong length", good().gzip(Gzip::BadLength), "it can't be unpacked"),
        ("not compressed", good().gzip(Gzip::NotGzip), "it can't be unpacked"),
        ("junk", Archive::new().junk([b'x'; 512]).file("ployzd", "x"), "it can't be unpacked"),
    ]
}

#[test]
fn each_is_refused_by_name_and_leaves_nothing() {
    let alone = alone();
    let world = World::new(&alone);
    world.release("1.3.0");
    world.installed(&exact("1.3.0"));
    let elsewhere = crate::world::snapshot(&world.root().join("etc"));
    for (name, archive, text) in hostile() {
        let published = Release::new("1.4.0").archive(archive).publish(world.site()).unwrap();
        let (reason, error) = world.failed(&from_disk("1.4.0", &published));
        assert_eq!(reason, "archive", "{name}: {error}");
        assert!(error.starts_with("refusing the archive: ") && error.contains(text), "{name}: {error}");
        assert!(error.len() < 300 && !error.contains(['\u{1b}', '\n']), "{name}: {error}");
        assert_eq!(crate::world::snapshot(&world.root().join("etc")), elsewhere, "{name}");
    }
}

#[test]
fn a_size_that_lies_is_refused() {
    let alone = alone();
    let world = World::new(&alone);
    for (name, size, follow) in [
        ("more than there is", 4096, 10),
        ("far more", 1 << 40, 10),
        ("more than any file", u64::MAX >> 1, 10),
    ] {
        let member = Member { size, ..Member::new("ployzd", b'0') };
        let archive = Archive::new().member(&member, vec![b'x'; follow]).without_end();
        let published = Release::new("1.4.0").archive(archive).publish(world.site()).unwrap();
        let (reason, error) = world.failed(&from_disk("1.4.0", &published));
        assert_eq!(reason, "archive", "{name}: {error}");
    }
}

#[test]
fn other_plain_files_are_skipped() {
    let alone = alone();
    let world = World::new(&alone);
    let archive = Archive::new()
        .file_with_mode("LICENSE", 0o644, "text")
        .file("share/doc/README", "text")
        .file("ployzd", script("1.4.0"))
        .file("ployzd.sig", "x");
    let published = Release::new("1.4.0").archive(archive).publish(world.site()).unwrap();
    world.installed(&from_disk("1.4.0", &published));
    let names = crate::world::snapshot(&world.host.bin()).into_keys();
    assert_eq!(names.collect::<Vec<_>>(), [world.host.bin(), world.host.installed()]);
}

#[test]
fn modes_in_an_archive_do_not_matter() {
    let alone = alone();
    let world = World::new(&alone);
    for mode in [0o000, 0o644, 0o777, 0o700] {
        let archive = Archive::new().file_with_mode("ployzd", mode, script_of(mode));
        let published = Release::new("1.4.0").archive(archive).publish(world.site()).unwrap();
        world.installed(&from_disk("1.4.0", &published));
        let meta = std::fs::metadata(world.host.installed()).unwrap();
        assert_eq!(std::os::unix::fs::PermissionsExt::mode(&meta.permissions()) & 0o7777, 0o755);
    }
}

/// A script of its own for each, so that each is replaced.
fn script_of(mode: u32) -> Vec<u8> {
    crate::world::script_that(&format!("# {mode:o}"), "1.4.0", crate::world::UNITS)
}
