//! Release trees as tar, gzip and sha256sum see them.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::fs;
use std::path::Path;
use std::process::Command;

use kit::release::{Archive, Checksums, Gzip, Member, Release, archive_name, tree};

/// Runs a command in a directory: whether it succeeded, and what it printed.
fn run(directory: &Path, command: &str) -> (bool, String) {
    let output =
        Command::new("sh").args(["-c", command]).current_dir(directory).env("LC_ALL", "C").output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    (output.status.success(), String::from_utf8_lossy(&text).into_owned())
}

/// What `tar` lists of an archive.
fn listed(archive: &Archive) -> (bool, String) {
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("a.tar.gz"), archive.bytes()).unwrap();
    run(directory.path(), "tar -P --numeric-owner -tvzf a.tar.gz")
}

#[test]
fn a_good_tree() {
    let site = tempfile::tempdir().unwrap();
    let release = tree(site.path(), "1.4.0", &[("ployzd", b"#!/bin/sh\n"), ("README", b"hello")]).unwrap();
    assert_eq!(release.directory, site.path().join("releases/download/v1.4.0"));
    assert_eq!(fs::metadata(&release.archive).unwrap().len(), release.length);
    assert_eq!(
        run(&release.directory, "sha256sum -c checksums.txt"),
        (true, format!("{}: OK\n", archive_name()))
    );
    let (good, names) = run(&release.directory, &format!("tar -xvzf {}", archive_name()));
    assert_eq!((good, names.as_str()), (true, "ployzd\nREADME\n"));
    assert_eq!(fs::read(release.directory.join("ployzd")).unwrap(), b"#!/bin/sh\n");
    assert_eq!(fs::read_to_string(site.path().join("v1/stable")).unwrap(), "v1.4.0\n");
    tree(site.path(), "1.5.0-rc.1", &[]).unwrap();
    assert_eq!(fs::read_to_string(site.path().join("v1/stable")).unwrap(), "v1.4.0\n");
    assert_eq!(fs::read_to_string(site.path().join("v1/beta")).unwrap(), "v1.5.0-rc.1\n");
}

#[test]
fn hostile_members() {
    let long = format!("{}/ployzd", "d".repeat(300));
    let archive = Archive::new()
        .file("/etc/absolute", "a")
        .file("../climbs", "b")
        .symlink("link", "/etc/passwd")
        .hard_link("hard", "link")
        .device("device")
        .fifo("fifo")
        .directory("directory/")
        .file_with_mode("setuid", 0o4755, "c")
        .file("twice", "1")
        .file("twice", "2")
        .file_with_gnu_name(&long, "d")
        .file_with_pax_name("pax", "plain", "e")
        .member(&Member { owner: 1000, ..Member::new("odd", b'7') }, [])
        .member(&Member::new(b"\xff\n".as_slice(), b'0'), [])
        .file("", "empty name");
    let (good, list) = listed(&archive);
    assert!(good, "{list}");
    for part in [
        " /etc/absolute\n",
        " ../climbs\n",
        "lrwxrwxrwx",
        " link -> /etc/passwd\n",
        " hard link to link\n",
        "crwxr-xr-x 0/0             1,3 ",
        "prwxr-xr-x",
        "drwxr-xr-x",
        "-rwsr-xr-x 0/0               1 ",
        " twice\n",
        &format!(" {long}\n"),
        " pax\n",
        " 1000/1000 ",
        " \\377\\n\n",
    ] {
        assert!(list.contains(part), "{part} is not in\n{list}");
    }
    assert!(!list.contains("plain") && !list.contains("LongLink"), "{list}");
    assert_eq!(list.matches("twice").count(), 2);
}

#[test]
fn gibibytes_of_zeros_are_small() {
    let archive = Archive::new().file("a", "x").zeros("ployzd", 10 << 30);
    let bytes = archive.bytes();
    assert!(bytes.len() < 64 << 20, "{}", bytes.len());
    let (_, list) = listed(&Archive::new().zeros("z", 3_000_001).file("behind", "y"));
    assert!(list.contains(" 3000001 ") && list.contains(" behind\n"), "{list}");
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("a.tar.gz"), Archive::new().zeros("z", 50 << 20).bytes()).unwrap();
    assert_eq!(run(directory.path(), "gzip -t a.tar.gz"), (true, String::new()));
    fs::write(directory.path().join("a.tar.gz"), &bytes).unwrap();
    let header =
        run(directory.path(), "gzip -dc a.tar.gz 2>/dev/null | head -c 2048 | tar -tvf - 2>/dev/null").1;
    assert!(header.contains(" 10737418240 "), "{header}");
}

#[test]
fn damaged_compression() {
    let directory = tempfile::tempdir().unwrap();
    for (gzip, good, words) in [
        (Gzip::Good, true, ""),
        (Gzip::TwoMembers, true, ""),
        (Gzip::Truncated(20), false, "unexpected end of file"),
        (Gzip::TrailingGarbage(100), false, "trailing garbage ignored"),
        (Gzip::BadChecksum, false, "crc error"),
        (Gzip::BadLength, false, "length error"),
        (Gzip::NotGzip, false, "not in gzip format"),
    ] {
        let archive = Archive::new().file("ployzd", vec![7; 100_000]).gzip(gzip);
        fs::write(directory.path().join("a.tar.gz"), archive.bytes()).unwrap();
        let (was_good, says) = run(directory.path(), "gzip -t a.tar.gz");
        assert!(was_good == good && says.contains(words), "{gzip:?}: {was_good} {says}");
    }
    let two = Archive::new().file("ployzd", vec![7; 100_000]).gzip(Gzip::TwoMembers);
    assert!(listed(&two).1.contains(" 100000 "));
    let open = Archive::new().file("ployzd", "x").without_end().junk("#".repeat(512));
    assert!(!listed(&open).0);
}

#[test]
fn checksums() {
    let site = tempfile::tempdir().unwrap();
    let archive = Archive::new().file("ployzd", "x");
    let text = |checksums| {
        let release =
            Release::new("1.4.0").archive(&archive).checksums(checksums).publish(site.path()).unwrap();
        let text = fs::read(release.directory.join("checksums.txt")).ok();
        (text.map(|text| String::from_utf8(text).unwrap()), release.sha256)
    };
    let name = archive_name();
    let (good, sum) = text(Checksums::Good);
    assert_eq!(good.unwrap(), format!("{sum}  {name}\n"));
    assert_eq!(text(Checksums::Absent).0, None);
    assert_eq!(text(Checksums::Twice).0.unwrap(), format!("{sum}  {name}\n").repeat(2));
    assert_eq!(text(Checksums::UpperCase).0.unwrap(), format!("{}  {name}\n", sum.to_uppercase()));
    assert_eq!(text(Checksums::Star).0.unwrap(), format!("{sum} *{name}\n"));
    assert_eq!(text(Checksums::Crlf).0.unwrap(), format!("{sum}  {name}\r\n"));
    assert_eq!(text(Checksums::LongerName).0.unwrap(), format!("{sum}  {name}.sig\n"));
    assert_eq!(text(Checksums::TooShort).0.unwrap(), format!("{}  {name}\n", &sum[1..]));
    assert_eq!(text(Checksums::Bom).0.unwrap(), format!("\u{feff}{sum}  {name}\n"));
    assert!(!text(Checksums::Missing).0.unwrap().contains(&name));
    let huge = text(Checksums::Huge).0.unwrap();
    assert!(huge.len() > 10_000_000 && huge.ends_with(&format!("{sum}  {name}\n")));
    for checksums in [Checksums::Wrong, Checksums::Contradicting] {
        let release =
            Release::new("1.4.0").archive(&archive).checksums(checksums).publish(site.path()).unwrap();
        assert!(!run(&release.directory, "sha256sum -c checksums.txt").0);
    }
}

#[test]
fn other_architectures_and_no_pointer() {
    let site = tempfile::tempdir().unwrap();
    let release =
        Release::new("2.0.0").arch("arm64").archive(Archive::new().file("ployzd", "x")).without_pointer();
    let release = release.file("ployz_linux_arm64.tar.gz", "y").publish(site.path()).unwrap();
    assert!(release.archive.ends_with("ployzd_linux_arm64.tar.gz"));
    assert!(!site.path().join("v2").exists());
    assert_eq!(run(&release.directory, "wc -l < checksums.txt").1.trim(), "2");
    assert!(Release::new("1.0.0").publish(site.path()).is_err());
}
