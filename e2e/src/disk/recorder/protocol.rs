//! The part of FUSE's protocol that one file in one directory needs, by include/uapi/linux/fuse.h.

/// Name of the file.
pub(super) const NAME: &str = "disk";
/// Largest write that the kernel may send.
pub(super) const MAX_WRITE: usize = 1 << 20;

/// Node of the directory; the file is the next one.
const DIRECTORY: u64 = 1;
const FILE: u64 = 2;
/// Length of the header of a request.
const HEADER: usize = 40;
/// Length of the arguments before the data of a write.
const WRITE_ARGUMENTS: usize = 40;

// Errors, as the kernel numbers them.
const NO_ENTRY: i32 = -2;
const INPUT_OUTPUT: i32 = -5;
const NOT_IMPLEMENTED: i32 = -38;

/// A request of the kernel.
pub(super) enum Request<'a> {
    /// Bytes of the file.
    Read { offset: u64, length: usize },
    /// Write to the file.
    Write { offset: u64, data: &'a [u8] },
    /// Flush the written data to disk.
    Flush,
    /// No answer needed: it forgets a node.
    Forget,
    /// A request that's answered by the size of the file.
    Other(Box<dyn Fn(u64) -> Answer>),
}

/// An answer to the kernel.
pub(super) enum Answer {
    Data(Vec<u8>),
    Error(i32),
}

impl Answer {
    pub(super) const BROKEN: Self = Self::Error(INPUT_OUTPUT);

    /// The answer to a write.
    pub(super) fn written(length: usize) -> Self {
        Self::Data(u64::try_from(length).unwrap_or(u64::MAX).to_ne_bytes().to_vec())
    }

    /// The bytes for the kernel, as an answer to the request with this number.
    pub(super) fn encode(self, answer_to: u64) -> Vec<u8> {
        let (error, data) = match self {
            Self::Data(data) => (0, data),
            Self::Error(error) => (error, Vec::new()),
        };
        let length = u32::try_from(16 + data.len()).unwrap_or(u32::MAX);
        [&length.to_ne_bytes()[..], &error.to_ne_bytes(), &answer_to.to_ne_bytes(), &data].concat()
    }
}

/// Reads a request, with its number. `None` if it's cut off.
pub(super) fn read(bytes: &[u8]) -> Option<(Request<'_>, u64)> {
    let (number, node) = (word(bytes, 8)?, word(bytes, 16)?);
    let arguments = bytes.get(HEADER..)?;
    let answer = |answer: fn(u64, u64) -> Answer| Request::Other(Box::new(move |size| answer(node, size)));
    let request = match half(bytes, 4)? {
        // LOOKUP
        1 => {
            let is_file = arguments.strip_suffix(&[0]) == Some(NAME.as_bytes());
            answer(if is_file { |_, size| entry(size) } else { |_, _| Answer::Error(NO_ENTRY) })
        }
        // FORGET, INTERRUPT, BATCH_FORGET
        2 | 36 | 42 => Request::Forget,
        // GETATTR, SETATTR: of times only
        3 | 4 => answer(|node, size| Answer::Data([vec![0; 16], attributes(node, size)].concat())),
        // OPEN, OPENDIR
        14 | 27 => answer(|_, _| Answer::Data(vec![0; 16])),
        // READ
        15 => {
            Request::Read { offset: word(arguments, 8)?, length: usize::try_from(half(arguments, 16)?).ok()? }
        }
        // WRITE
        16 => Request::Write { offset: word(arguments, 8)?, data: arguments.get(WRITE_ARGUMENTS..)? },
        // RELEASE, FLUSH of a closed file, RELEASEDIR, DESTROY
        18 | 25 | 29 | 38 => answer(|_, _| Answer::Data(Vec::new())),
        // FSYNC
        20 => Request::Flush,
        // INIT
        26 => answer(|_, _| init()),
        _ => answer(|_, _| Answer::Error(NOT_IMPLEMENTED)),
    };
    Some((request, number))
}

fn word(bytes: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_ne_bytes(bytes.get(at..at + 8)?.try_into().ok()?))
}

fn half(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_ne_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

/// Our version, and support for writes up to [`MAX_WRITE`].
fn init() -> Answer {
    const BIG_WRITES: u32 = 1 << 5;
    const MAX_PAGES: u32 = 1 << 22;
    let mut answer = Vec::new();
    let largest = u32::try_from(MAX_WRITE).unwrap_or(u32::MAX);
    // Version, readahead, flags, the numbers of requests in the background, the largest write, the grain of time.
    for number in [7, 31, 0, BIG_WRITES | MAX_PAGES, 0x000c_0010, largest, 1] {
        answer.extend(u32::to_ne_bytes(number));
    }
    answer.extend(u16::try_from(MAX_WRITE / 4096).unwrap_or(u16::MAX).to_ne_bytes());
    answer.resize(64, 0);
    Answer::Data(answer)
}

fn entry(size: u64) -> Answer {
    let node = [FILE.to_ne_bytes(), [0; 8], [0; 8], [0; 8], [0; 8]].concat();
    Answer::Data([node, attributes(FILE, size)].concat())
}

fn attributes(node: u64, size: u64) -> Vec<u8> {
    let (mode, size) = if node == DIRECTORY { (0o040_755, 0) } else { (0o100_600, size) };
    let mut answer = Vec::new();
    for number in [node, size, size / 512, 0, 0, 0] {
        answer.extend(u64::to_ne_bytes(number));
    }
    // Parts of seconds, mode, links, owner, group, device, size of a block, flags.
    for number in [0, 0, 0, mode, 1, 0, 0, 0, 4096, 0] {
        answer.extend(u32::to_ne_bytes(number));
    }
    answer
}
