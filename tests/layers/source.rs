//! A source file as the compiler sees it: without comments, with string literals apart, without its tests.

use std::fs;
use std::path::Path;

/// One file.
pub(crate) struct Source {
    /// `src/install/flow.rs`.
    pub(crate) file: String,
    /// Its text without comments, literals and tests.
    code: String,
    /// Its string literals.
    pub(crate) literals: Vec<String>,
}

impl Source {
    pub(crate) fn read(path: &Path) -> Self {
        Self::of(path.to_str().unwrap(), &fs::read_to_string(path).unwrap())
    }

    pub(crate) fn of(file: &str, text: &str) -> Self {
        // Tests are at the end of a file, and may look at anything.
        let text = text.split("\n#[cfg(test)]\nmod tests {").next().unwrap_or_default();
        let (code, literals) = without_text(text);
        Self { file: file.to_owned(), code, literals }
    }

    /// Where it is in the crate: `["install", "flow"]`.
    fn module(&self) -> Vec<&str> {
        let path = self.file.trim_start_matches("src/").trim_end_matches(".rs");
        if path == "lib" { Vec::new() } else { path.split('/').collect() }
    }

    /// The first of them: the layer.
    pub(crate) fn part(&self) -> &str {
        self.module().first().copied().unwrap_or("lib")
    }

    pub(crate) fn has(&self, word: &str) -> bool {
        self.code.match_indices(word).any(|(at, _)| !self.code[..at].ends_with(is_word))
    }

    /// Every path of the crate that it names, by `crate::` or by `super::`.
    pub(crate) fn paths(&self) -> Vec<Vec<String>> {
        let mut all = Vec::new();
        for (start, at) in ["crate", "super"].iter().flat_map(|start| {
            self.code.match_indices(&format!("{start}::")).map(|(at, _)| (*start, at)).collect::<Vec<_>>()
        }) {
            let before = &self.code[..at];
            if before.ends_with(is_word) || before.ends_with("super::") || before.ends_with('$') {
                continue;
            }
            let mut base: Vec<String> = Vec::new();
            let mut rest = &self.code[at..];
            if start == "super" {
                base = self.module().iter().map(|part| (*part).to_owned()).collect();
                while let Some(after) = rest.strip_prefix("super::") {
                    base.pop();
                    rest = after;
                }
            } else {
                rest = &rest["crate::".len()..];
            }
            tree(&base, rest, &mut all);
        }
        all
    }
}

fn is_word(letter: char) -> bool {
    letter.is_alphanumeric() || letter == '_'
}

/// Reads what follows `a::`: a name, a path, or a group of them. Returns what is left.
fn tree<'a>(base: &[String], text: &'a str, all: &mut Vec<Vec<String>>) -> &'a str {
    let mut text = text.trim_start();
    if let Some(mut inside) = text.strip_prefix('{') {
        loop {
            inside = inside.trim_start().trim_start_matches(',').trim_start();
            if let Some(after) = inside.strip_prefix('}') {
                return after;
            }
            let left = tree(base, inside, all);
            // `as name`
            inside = left.trim_start_matches(|letter: char| letter != ',' && letter != '}');
        }
    }
    let length = text.find(|letter| !is_word(letter)).unwrap_or(text.len());
    let (name, rest) = text.split_at(length);
    let mut path = base.to_vec();
    if !name.is_empty() && name != "self" {
        path.push(name.to_owned());
    }
    text = rest;
    match text.strip_prefix("::") {
        Some(after) if !after.starts_with('<') => tree(&path, after, all),
        _ => {
            all.push(path);
            text.trim_start_matches('*')
        }
    }
}

/// Takes comments and literals out of a text; literals come back apart.
fn without_text(text: &str) -> (String, Vec<String>) {
    let (mut code, mut literals) = (String::new(), Vec::new());
    let mut rest = text;
    while let Some(letter) = rest.chars().next() {
        if rest.starts_with("//") {
            rest = &rest[rest.find('\n').unwrap_or(rest.len())..];
        } else if rest.starts_with("/*") {
            rest = &rest[rest.find("*/").map_or(rest.len(), |at| at + 2)..];
        } else if let Some(hashes) = raw_start(rest) {
            let open = "r".len() + hashes + "\"".len();
            let end = format!("\"{}", "#".repeat(hashes));
            let length = rest[open..].find(&end).unwrap_or(rest.len() - open);
            literals.push(rest[open..open + length].to_owned());
            rest = &rest[(open + length + end.len()).min(rest.len())..];
        } else if letter == '"' {
            let length = quoted(&rest[1..]);
            literals.push(rest[1..=length].to_owned());
            rest = &rest[length + 2..];
        } else if letter == '\'' && character(rest).is_some() {
            rest = &rest[character(rest).unwrap_or(1)..];
        } else {
            code.push(letter);
            rest = &rest[letter.len_utf8()..];
        }
    }
    (code, literals)
}

/// The number of `#` of a raw string that starts here.
fn raw_start(text: &str) -> Option<usize> {
    let after = text.strip_prefix('r')?;
    let hashes = after.len() - after.trim_start_matches('#').len();
    after[hashes..].starts_with('"').then_some(hashes)
}

/// How long a string is, up to its closing quote.
fn quoted(text: &str) -> usize {
    let mut escaped = false;
    for (at, letter) in text.char_indices() {
        match letter {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            '"' => return at,
            _ => {}
        }
    }
    text.len()
}

/// The length of a character literal that starts here; none for a lifetime.
fn character(text: &str) -> Option<usize> {
    let inside = &text[1..];
    if let Some(escape) = inside.strip_prefix('\\') {
        return escape.char_indices().skip(1).find(|(_, letter)| *letter == '\'').map(|(at, _)| at + 3);
    }
    let letter = inside.chars().next()?;
    inside[letter.len_utf8()..].starts_with('\'').then(|| letter.len_utf8() + 2)
}
