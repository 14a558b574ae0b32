//! What is in the document root, and which part of it was asked for.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::head::Head;

/// A file that is served.
#[derive(Debug)]
pub(crate) struct Served {
    pub(crate) file: File,
    pub(crate) length: u64,
    pub(crate) etag: String,
    pub(crate) modified: String,
    pub(crate) kind: &'static str,
}

/// Which part of a file is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// All of it.
    Whole,
    /// From the first to the last byte, both included.
    Range(u64, u64),
    /// None: nothing of what was asked for is there.
    Unsatisfiable,
}

/// Opens what a path stands for below the root. An error is the status to answer.
pub(crate) fn open(root: &Path, path: &str) -> Result<Served, u16> {
    let climbs = path.split('/').any(|part| part == "..");
    if climbs || path.contains(['\0', '\\']) {
        return Err(400);
    }
    let root = root.canonicalize().map_err(|_| 404_u16)?;
    let real =
        root.join(path.trim_start_matches('/')).canonicalize().map_err(|problem| status_of(&problem))?;
    if !real.starts_with(&root) {
        return Err(403);
    }
    // Looked at before it is opened: opening a fifo waits for its writer.
    if !real.metadata().map_err(|problem| status_of(&problem))?.is_file() {
        return Err(404);
    }
    let file = File::open(&real).map_err(|problem| status_of(&problem))?;
    let data = file.metadata().map_err(|problem| status_of(&problem))?;
    Ok(Served {
        file,
        length: data.len(),
        etag: format!("\"{:x}-{:x}-{:x}-{:x}\"", data.ino(), data.len(), data.mtime(), data.mtime_nsec()),
        modified: data.modified().map(httpdate::fmt_http_date).unwrap_or_default(),
        kind: kind(&real),
    })
}

fn status_of(problem: &io::Error) -> u16 {
    match problem.kind() {
        io::ErrorKind::PermissionDenied => 403,
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory | io::ErrorKind::InvalidFilename => 404,
        _ => 500,
    }
}

fn kind(path: &Path) -> &'static str {
    // A registry's: Docker goes by this type.
    if path.parent().is_some_and(|parent| parent.ends_with("manifests")) {
        return "application/vnd.docker.distribution.manifest.v2+json";
    }
    match path.extension().and_then(|extension| extension.to_str()) {
        None | Some("txt" | "sh") => "text/plain; charset=utf-8",
        Some("html") => "text/html; charset=utf-8",
        Some("json") => "application/json",
        Some("gz") => "application/gzip",
        Some(_) => "application/octet-stream",
    }
}

impl Served {
    /// The part that a request asks for. `If-Range` that names another state of the file asks for all of it,
    /// and so does what is not understood, or several ranges at once.
    pub(crate) fn part(&self, head: &Head) -> Part {
        let condition = head.header("if-range");
        if condition.is_some_and(|condition| condition != self.etag && condition != self.modified) {
            return Part::Whole;
        }
        self.part_whatever_the_condition(head)
    }

    /// The part that a request asks for by `Range` alone.
    pub(crate) fn part_whatever_the_condition(&self, head: &Head) -> Part {
        match head.header("range") {
            Some(range) if head.method == "GET" => range_of(range, self.length).unwrap_or(Part::Whole),
            _ => Part::Whole,
        }
    }

    /// Whether the client has this state of the file already.
    pub(crate) fn is_known(&self, head: &Head) -> bool {
        match (head.header("if-none-match"), head.header("if-modified-since")) {
            (Some(tags), _) => {
                tags.split(',').any(|tag| matches!(tag.trim(), tag if tag == self.etag || tag == "*"))
            }
            (None, Some(date)) => date == self.modified,
            (None, None) => false,
        }
    }
}

fn range_of(range: &str, length: u64) -> Option<Part> {
    let (first, last) = range.strip_prefix("bytes=")?.split_once('-')?;
    let (first, last) = match (first.is_empty(), last.is_empty()) {
        (true, true) => return None,
        (true, false) => {
            let wanted: u64 = last.parse().ok()?;
            if wanted == 0 {
                return Some(Part::Unsatisfiable);
            }
            (length.saturating_sub(wanted), u64::MAX)
        }
        (false, true) => (first.parse().ok()?, u64::MAX),
        (false, false) => (first.parse().ok()?, last.parse().ok()?),
    };
    if first > last {
        return None;
    }
    Some(if first < length { Part::Range(first, last.min(length - 1)) } else { Part::Unsatisfiable })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges() {
        for (range, part) in [
            ("bytes=0-", Some(Part::Range(0, 9))),
            ("bytes=3-5", Some(Part::Range(3, 5))),
            ("bytes=3-500", Some(Part::Range(3, 9))),
            ("bytes=-3", Some(Part::Range(7, 9))),
            ("bytes=-30", Some(Part::Range(0, 9))),
            ("bytes=9-9", Some(Part::Range(9, 9))),
            ("bytes=10-", Some(Part::Unsatisfiable)),
            ("bytes=-0", Some(Part::Unsatisfiable)),
            ("bytes=5-3", None),
            ("bytes=-", None),
            ("bytes=1-2,4-5", None),
            ("lines=1-2", None),
        ] {
            assert_eq!(range_of(range, 10), part, "{range}");
        }
        assert_eq!(range_of("bytes=0-", 0), Some(Part::Unsatisfiable));
    }

    #[test]
    fn a_type_goes_by_the_name_and_that_of_a_manifest_by_its_directory() {
        for (path, expected) in [
            ("/r/machine", "text/plain; charset=utf-8"),
            ("/r/a.tar.gz", "application/gzip"),
            ("/r/v2/app/manifests/1", "application/vnd.docker.distribution.manifest.v2+json"),
            ("/r/v2/app/manifests/1.json", "application/vnd.docker.distribution.manifest.v2+json"),
        ] {
            assert_eq!(kind(Path::new(path)), expected, "{path}");
        }
    }

    #[test]
    fn what_is_outside_stays_outside() {
        let outer = tempfile::tempdir().unwrap();
        let root = outer.path().join("root");
        std::fs::create_dir(&root).unwrap();
        std::fs::write(outer.path().join("secret"), "s").unwrap();
        std::fs::write(root.join("a"), "a").unwrap();
        std::os::unix::fs::symlink("../secret", root.join("out")).unwrap();
        std::os::unix::fs::symlink("a", root.join("in")).unwrap();
        let status = |path: &str| open(&root, path).map(|served| served.length);
        assert_eq!(status("/a"), Ok(1));
        assert_eq!(status("//a"), Ok(1));
        assert_eq!(status("/in"), Ok(1));
        assert_eq!(status("/out"), Err(403));
        assert_eq!(status("/../secret"), Err(400));
        assert_eq!(status("/a\0"), Err(400));
        assert_eq!(status("/"), Err(404));
        assert_eq!(status("/b"), Err(404));
        assert_eq!(status("/a/b"), Err(404));
    }
}
