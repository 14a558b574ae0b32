//! A body as it is sent: a piece at a time, whatever its length.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// The bytes of one answer.
#[derive(Debug)]
pub(crate) struct Body {
    source: Source,
    /// Where in the source the next byte is.
    at: u64,
    /// How many bytes of the source are still to come.
    left: u64,
    /// How many bytes come after it.
    extra: u64,
    /// The byte of the source that is another one.
    flip: Option<u64>,
}

#[derive(Debug)]
enum Source {
    Bytes(Vec<u8>),
    File(File),
}

impl Body {
    /// No byte.
    pub(crate) fn empty() -> Self {
        Self::bytes(Vec::new())
    }

    /// These bytes.
    pub(crate) fn bytes(bytes: Vec<u8>) -> Self {
        let left = bytes.len() as u64;
        Self { source: Source::Bytes(bytes), at: 0, left, extra: 0, flip: None }
    }

    /// A part of a file.
    pub(crate) fn file(file: File, at: u64, length: u64) -> Self {
        Self { source: Source::File(file), at, left: length, extra: 0, flip: None }
    }

    /// The same with one wrong byte.
    pub(crate) fn flipped(self, flip: Option<u64>) -> Self {
        Self { flip, ..self }
    }

    /// The same, and so many bytes more.
    pub(crate) fn followed_by(self, extra: u64) -> Self {
        Self { extra, ..self }
    }

    /// How many bytes of the source are still to come; what follows it is not counted.
    pub(crate) fn length(&self) -> u64 {
        self.left
    }

    /// All of it, if it is in memory anyway.
    pub(crate) fn into_bytes(self) -> Vec<u8> {
        match self.source {
            Source::Bytes(bytes) => bytes,
            Source::File(_) => Vec::new(),
        }
    }

    /// The next bytes; none at the end. A file that became shorter is an error.
    ///
    /// A file is read in place: what is served was written a moment ago and is in the page cache.
    pub(crate) fn next(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.left == 0 {
            let count = fitting(buffer.len(), self.extra);
            buffer[..count].fill(0);
            self.extra -= count as u64;
            return Ok(count);
        }
        let wanted = fitting(buffer.len(), self.left);
        let count = match &self.source {
            Source::File(file) => file.read_at(&mut buffer[..wanted], self.at)?,
            Source::Bytes(bytes) => {
                let at = usize::try_from(self.at).map_err(io::Error::other)?;
                buffer[..wanted].copy_from_slice(&bytes[at..at + wanted]);
                wanted
            }
        };
        if count == 0 && wanted > 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the file became shorter"));
        }
        if let Some(flip) = self.flip.and_then(|flip| flip.checked_sub(self.at))
            && let Some(byte) = usize::try_from(flip).ok().and_then(|flip| buffer[..count].get_mut(flip))
        {
            *byte ^= 0xff;
        }
        self.at += count as u64;
        self.left -= count as u64;
        Ok(count)
    }
}

/// The smaller of the two.
pub(crate) fn fitting(room: usize, wanted: u64) -> usize {
    usize::try_from(wanted).map_or(room, |wanted| wanted.min(room))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_flip_and_extra() {
        let mut body = Body::bytes(b"abcdef".to_vec()).flipped(Some(4)).followed_by(3);
        assert_eq!(body.length(), 6);
        let mut all = Vec::new();
        let mut buffer = [1; 4];
        loop {
            let count = body.next(&mut buffer).unwrap();
            if count == 0 {
                break;
            }
            all.extend_from_slice(&buffer[..count]);
        }
        assert_eq!(all, [b'a', b'b', b'c', b'd', b'e' ^ 0xff, b'f', 0, 0, 0]);
    }
}
