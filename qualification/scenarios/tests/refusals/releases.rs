//! Rows of a release: what `checksums.txt` says, what an archive holds, what a binary does. Each archive has the right
//! sum; each binary is in a good archive.

use kit::release::{Archive, Gzip, Member, archive_name, sha256};
use scenarios::release;
use serde_json::json;

use crate::table::{PREFLIGHT, Table, UPGRADE, VERIFYING};

/// The form is strict: what `sha256sum` itself would take in text mode, and nothing else.
pub(crate) fn checksums(table: &mut Table<'_>) {
    let name = archive_name();
    let sum = release("1.5.0").archive_sha256();
    let strictly = "not 64 lower-case hex digits";
    let upper = sum.to_uppercase();
    for (row, text, says) in [
        ("twice", format!("{sum}  {name}\n{sum}  {name}\n"), "more than one line"),
        ("upper case", format!("{upper}  {name}\n"), &upper[..20]),
        ("binary marker", format!("{sum} *{name}\n"), " *ployzd"),
        ("line ends of DOS", format!("{sum}  {name}\r\n"), strictly),
        ("63 digits", format!("{}  {name}\n", &sum[1..]), strictly),
        ("65 digits", format!("0{sum}  {name}\n"), strictly),
        ("not hex", format!("g{}  {name}\n", &sum[1..]), "\"g"),
        ("one space", format!("{sum} {name}\n"), strictly),
        ("of other bytes", format!("{}  {name}\n", sha256(b"other")), "and checksums.txt says"),
        ("no digest", format!("{name}\n"), strictly),
    ] {
        let rule = json!({"path": "*/checksums.txt", "body": text});
        table.source(&format!("sums: {row}"), &rule, VERIFYING, says, 5);
    }
    // The same text, since the same is observed: there is no line for the name.
    for (row, text) in [
        ("only a longer name", format!("{sum}  {name}.sig\n")),
        ("only a part of a name", format!("{sum}  old-{name}\n")),
        ("name in a directory", format!("{sum}  dist/{name}\n")),
        ("empty", String::new()),
        ("a page", "<!DOCTYPE html>\n<html>Something went wrong</html>\n".to_owned()),
    ] {
        table.server.rules(&json!([{"path": "*/checksums.txt", "body": text}]));
        table.also(&format!("sums: {row}"), UPGRADE, VERIFYING, &format!("has no line for {name}"), 5);
        table.server.obey();
    }
}

pub(crate) fn archives(table: &mut Table<'_>) {
    let good = || Archive::new().file("ployzd", "#!/bin/sh\n");
    for (name, archive, says) in [
        ("absolute path", good().file("/etc/cron.d/x", "x"), "\"/etc/cron.d/x\" is not a clean"),
        ("climbs", good().file("../../bin/sh", "x"), "\"../../bin/sh\" is not a clean"),
        ("ployzd is a symlink", Archive::new().symlink("ployzd", "/bin/sh"), "(Symlink)"),
        ("hard link", good().hard_link("also", "/etc/shadow"), "\"also\" is not a regular file (Link)"),
        ("device", good().device("null"), "(Char)"),
        ("fifo", good().fifo("pipe"), "(Fifo)"),
        ("directory", good().directory("d"), "(Directory)"),
        ("setuid", Archive::new().file_with_mode("ployzd", 0o4755, "x"), "has mode 4755"),
        ("setgid", Archive::new().file_with_mode("ployzd", 0o2755, "x"), "has mode 2755"),
        ("two ployzd", good().file("ployzd", "x"), "it holds 2 files named ployzd"),
        ("no ployzd", Archive::new().file("other", "x"), "it holds 0 files named ployzd"),
        ("sparse", Archive::new().member(&Member::new("ployzd", b'S'), []), "(GNUSparse)"),
        ("long name", good().file_with_gnu_name(&"d/".repeat(120), "x"), "(GNULongName)"),
        ("pax header", good().file_with_pax_name("../../x", "fine", "x"), "(XHeader)"),
        ("10 GiB of zeros", Archive::new().zeros("ployzd", 10 << 30), "unpacks to more than 134217728"),
        ("not a gzip", good().gzip(Gzip::NotGzip), "invalid gzip header"),
        ("gzip that is cut off", good().gzip(Gzip::Truncated(4)), "can't be unpacked"),
        ("bytes after it", good().gzip(Gzip::TrailingGarbage(100)), "bytes follow its end"),
        ("wrong check sum", good().gzip(Gzip::BadChecksum), "corrupt gzip"),
    ] {
        table.publish(&archive.bytes());
        // Extraction is the first half of preflight: nothing but what was verified is unpacked.
        table.refused(&format!("archive: {name}"), UPGRADE, PREFLIGHT, says, 8);
    }
    table.publish_good();
}

pub(crate) fn binaries(table: &mut Table<'_>) {
    let script = |text: &str| format!("#!/bin/sh\n{text}\n").into_bytes();
    let says = |version: &str| script(&format!("echo '{{\"version\":\"{version}\"}}'"));
    // A whole program, but for the name of its machine.
    let mut foreign = std::fs::read(release("1.5.0").ployzd()).unwrap();
    foreign[18] = 0xb7;
    // Sleeps for a length that nothing else here sleeps for.
    let stays = script(
        "(trap '' HUP TERM; exec setsid sleep 7654321) </dev/null >/dev/null 2>&1 &\necho '{\"version\":\"1.6.0\"}'",
    );
    for (name, ployzd, text) in [
        ("another version", says("1.4.9"), "says that it is 1.4.9, not 1.5.0"),
        ("text", b"good morning\n".to_vec(), "Exec format error"),
        ("for arm64", foreign, "is for another processor (ELF machine 183"),
        ("no interpreter", b"#!/nonexistent/sh\n".to_vec(), "No such file"),
        ("hangs", script("sleep 600"), "did not end within 2 s"),
        ("fails", script("echo broken >&2; exit 9"), "exited with status 9; it said: broken"),
        ("crashes", script("kill -SEGV $$"), "was killed by SIGSEGV"),
        ("talks for ever", script("while :; do echo y; done"), "wrote more than 65536 bytes"),
        ("says a page", script("echo '<html>'"), "not its version"),
        ("leaves a child", stays, "says that it is 1.6.0"),
    ] {
        table.publish(&Archive::new().file("ployzd", ployzd).bytes());
        table.refused(&format!("binary: {name}"), UPGRADE, PREFLIGHT, text, 10);
        let left = table.machine.run("pgrep -fx 'sleep 7654321'");
        assert_eq!(left.text(), "", "what a new binary started has outlived it");
    }
    table.publish_good();
}
