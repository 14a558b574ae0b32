//! The ledger, `qualification/EVIDENCE.md`: every promise is in it, every test that it names exists, and what is there
//! to show something is run.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

const LEDGER: &str = "qualification/EVIDENCE.md";

/// The promises: a letter, and how many there are of it. S user stories; M, E, R, X, O decisions; F field reports.
const PROMISES: [(char, u32); 7] = [('S', 22), ('M', 5), ('E', 6), ('R', 8), ('X', 5), ('O', 7), ('F', 60)];

/// One line of the ledger.
struct Row {
    id: String,
    promise: String,
    rung: String,
    shown: String,
    limits: String,
}

fn rows() -> Vec<Row> {
    let text = fs::read_to_string(LEDGER).unwrap();
    let mut rows = Vec::new();
    for line in text.lines().filter(|line| line.starts_with('|')) {
        let cells: Vec<_> = line.trim_matches('|').split(" | ").map(|cell| cell.trim().to_owned()).collect();
        let Ok([id, promise, rung, shown, limits]) = <[String; 5]>::try_from(cells) else { continue };
        let letter = id.chars().next().unwrap_or('|');
        if PROMISES.iter().any(|(known, _)| *known == letter) && id[1..].parse::<u32>().is_ok() {
            rows.push(Row { id, promise, rung, shown, limits });
        }
    }
    rows
}

/// The tests that a line names: file and function.
fn named(row: &Row) -> Vec<(String, String)> {
    let quoted = row.shown.split('`').skip(1).step_by(2);
    quoted
        .filter_map(|text| text.split_once(".rs::"))
        .map(|(file, name)| (format!("{file}.rs"), name.into()))
        .collect()
}

/// The tests of a file.
fn tests_in(file: &Path) -> BTreeSet<String> {
    let text = fs::read_to_string(file).unwrap_or_default();
    let after_attribute = text.split("#[test]").skip(1);
    let name = |after: &str| Some(after.split_once("fn ")?.1.split_once('(')?.0.to_owned());
    after_attribute.filter_map(name).collect()
}

#[test]
fn every_promise_is_in_it_once() {
    let mut found: BTreeMap<String, u32> = BTreeMap::new();
    for row in rows() {
        *found.entry(row.id).or_default() += 1;
    }
    let expected =
        PROMISES.iter().flat_map(|(letter, count)| (1..=*count).map(move |n| (format!("{letter}{n}"), 1)));
    assert_eq!(found, expected.collect());
}

#[test]
fn every_test_that_it_names_exists() {
    let mut known: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for row in rows() {
        for (file, name) in named(&row) {
            let tests = known.entry(file.clone()).or_insert_with(|| tests_in(Path::new(&file)));
            assert!(tests.contains(&name), "{}: there is no test {name} in {file}", row.id);
        }
    }
    assert!(known.len() > 20, "the ledger names tests");
}

#[test]
fn every_line_says_where_it_is_shown_and_what_that_does_not_show() {
    for row in rows() {
        let Row { id, promise, rung, shown, limits } = &row;
        assert!(promise.len() > 10 && !limits.is_empty(), "{id}");
        let tests = named(&row);
        // A promise rests on tests, or the ledger says that it rests on nothing yet.
        assert!(!tests.is_empty() || shown.starts_with("— not built yet: "), "{id}: {shown}");
        let of_file = |file: &str| match file {
            _ if file.starts_with("src/") || file.starts_with("tests/install/") => "1",
            _ if file.starts_with("tests/") => "2",
            // Power that is really cut; real Docker and what it serves.
            "qualification/scenarios/tests/power_loss.rs"
            | "qualification/scenarios/tests/worker_power.rs"
            | "qualification/scenarios/tests/volumes.rs"
            | "qualification/scenarios/tests/zfs.rs"
            | "qualification/scenarios/tests/bad_releases.rs"
            | "qualification/scenarios/tests/deploy_door.rs"
            | "qualification/scenarios/tests/docker_prepared.rs"
            | "qualification/scenarios/tests/pulls.rs"
            | "qualification/scenarios/tests/service_limits.rs"
            | "qualification/scenarios/tests/services.rs"
            | "qualification/scenarios/tests/uninstall.rs" => "4",
            _ if file.starts_with("qualification/scenarios/tests/") => "3",
            _ => panic!("{id}: {file} is on no rung"),
        };
        let rungs: BTreeSet<_> = tests.iter().map(|(file, _)| of_file(file)).collect();
        let expected =
            if rungs.is_empty() { "—".into() } else { rungs.into_iter().collect::<Vec<_>>().join(", ") };
        assert_eq!(*rung, expected, "the rungs of {id}");
    }
}

/// What is run by a person only, and why.
const BY_HAND: [(&str, &str); 1] = [("demo", "it is there to be watched; what it does, scenarios check")];

#[test]
fn what_is_there_to_show_something_is_run() {
    let test = fs::read_to_string("qualification/test").unwrap();
    // Every program of the scenarios is run, since none is chosen; the same for all other members of the workspace.
    let code: String = test.lines().filter(|line| !line.starts_with('#')).collect();
    assert!(code.contains("-p $scenarios") && code.contains("--workspace --exclude $scenarios"));
    let mut files = vec![PathBuf::from("qualification/scenarios/tests")];
    if code.contains("--test ") {
        while let Some(path) = files.pop() {
            let stem = path.file_stem().unwrap().to_str().unwrap().to_owned();
            if path.is_dir() {
                files.extend(fs::read_dir(path).unwrap().map(|entry| entry.unwrap().path()));
            } else {
                assert!(code.contains(&stem), "{stem} is not called by qualification/test");
            }
        }
    }
    let mut called = test;
    for dir in ["qualification/scenarios/src", "qualification/scenarios/tests", "qualification/kit/tests"] {
        called.push_str(&text_below(Path::new(dir)));
    }
    let scripts: Vec<String> =
        fs::read_dir("qualification").unwrap().filter_map(|entry| script(&entry.unwrap().path())).collect();
    assert!(scripts.len() > 5);
    let mut reached = BTreeSet::from(["test".to_owned()]);
    loop {
        let calls = |name: &String| {
            ["qualification/", "$HERE/", "$here/"]
                .iter()
                .any(|from| mentions(&called, &format!("{from}{name}")))
        };
        let new: Vec<_> =
            scripts.iter().filter(|name| !reached.contains(*name) && calls(name)).cloned().collect();
        if new.is_empty() {
            break;
        }
        for name in new {
            called.push_str(&fs::read_to_string(Path::new("qualification").join(&name)).unwrap());
            reached.insert(name);
        }
    }
    for name in scripts {
        let by_hand = BY_HAND.iter().any(|(known, _)| *known == name);
        assert!(
            reached.contains(&name) || by_hand,
            "qualification/{name} is called by nothing that qualification/test calls"
        );
    }
}

/// The name of an executable script.
fn script(path: &Path) -> Option<String> {
    let meta = fs::metadata(path).unwrap();
    (meta.is_file() && meta.permissions().mode() & 0o111 != 0)
        .then(|| path.file_name().unwrap().to_str().unwrap().to_owned())
}

/// Whether a text has a word that is not the start of a longer one.
fn mentions(text: &str, word: &str) -> bool {
    let ends =
        |after: &str| !after.starts_with(|next: char| next.is_alphanumeric() || next == '-' || next == '_');
    text.match_indices(word).any(|(at, _)| ends(&text[at + word.len()..]))
}

fn text_below(dir: &Path) -> String {
    let mut text = String::new();
    for entry in fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            text.push_str(&text_below(&path));
        } else {
            text.push_str(&fs::read_to_string(&path).unwrap());
        }
    }
    text
}

#[test]
fn every_scenario_shows_something() {
    let named: BTreeSet<String> = rows().iter().flat_map(named).map(|(file, _)| file).collect();
    for entry in fs::read_dir("qualification/scenarios/tests").unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() {
            assert!(named.contains(path.to_str().unwrap()), "{path:?} shows no promise of the ledger");
        }
    }
}
