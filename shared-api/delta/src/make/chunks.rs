//! Comparison of large files by chunks that end where a rolling sum of their content has some zeros, so that insertions move
//! the ends along. It finds what was moved, and no small changes; it needs little memory.

use std::collections::HashMap;
use std::io::{self, Read};

use ring::digest::{SHA256, digest};

/// Shortest and longest chunk, and the bits that are zero at its end, which make the average: 8 KiB.
const MIN: usize = 2 << 10;
const MAX: usize = 64 << 10;
const BITS: u32 = 13;

/// A part of the new file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Segment {
    /// The next bytes stand in the old file at a position.
    Old {
        at: u64,
        size: u64,
    },
    New {
        size: u64,
    },
}

/// The new file in terms of the old one.
pub(super) fn compare_files(old: impl Read, new: impl Read) -> io::Result<Vec<Segment>> {
    let (mut known, mut position) = (HashMap::new(), 0);
    split_content(old, |chunk| {
        known.entry(key_of(chunk)).or_insert(position);
        position += chunk.len() as u64;
    })?;
    let mut segments: Vec<Segment> = Vec::new();
    split_content(new, |chunk| {
        let length = chunk.len() as u64;
        match (segments.last_mut(), known.get(&key_of(chunk))) {
            (Some(Segment::Old { at, size }), Some(found)) if *at + *size == *found => *size += length,
            (Some(Segment::New { size }), None) => *size += length,
            (_, Some(found)) => segments.push(Segment::Old { at: *found, size: length }),
            (_, None) => segments.push(Segment::New { size: length }),
        }
    })?;
    Ok(segments)
}

fn key_of(chunk: &[u8]) -> [u8; 16] {
    let mut key = [0; 16];
    key.copy_from_slice(&digest(&SHA256, chunk).as_ref()[..16]);
    key
}

fn split_content(mut content: impl Read, mut each: impl FnMut(&[u8])) -> io::Result<()> {
    let (mut piece, mut chunk, mut sum) = (vec![0; super::PIECE], Vec::with_capacity(MAX), 0_u64);
    loop {
        let read = content.read(&mut piece)?;
        if read == 0 {
            break;
        }
        for byte in &piece[..read] {
            chunk.push(*byte);
            // An old byte leaves the sum at its top, after 64 others.
            sum = (sum << 1).wrapping_add(GEAR[usize::from(*byte)]);
            let ends = sum >> (u64::BITS - BITS) == 0 && chunk.len() >= MIN;
            if ends || chunk.len() == MAX {
                each(&chunk);
                chunk.clear();
            }
        }
    }
    if !chunk.is_empty() {
        each(&chunk);
    }
    Ok(())
}

/// A random number for each byte.
const GEAR: [u64; 256] = {
    let (mut table, mut seed, mut at) = ([0; 256], 0_u64, 0);
    while at < table.len() {
        seed = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = (seed ^ (seed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        table[at] = mixed ^ (mixed >> 31);
        at += 1;
    }
    table
};

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn an_insertion_moves_the_rest() {
        let old: Vec<u8> =
            (0..1_000_000_u32).flat_map(|n| n.wrapping_mul(n).to_le_bytes()[2..3].to_vec()).collect();
        let new = [&old[..400_000], b"inserted", &old[400_000..]].concat();
        let segments = compare_files(&old[..], &new[..]).unwrap();
        let sent: u64 = segments.iter().map(|s| if let Segment::New { size } = s { *size } else { 0 }).sum();
        let all: u64 = segments
            .iter()
            .map(|s| match s {
                Segment::Old { size, .. } | Segment::New { size } => *size,
            })
            .sum();
        assert_eq!(all, new.len() as u64);
        assert!(sent < 3 * MAX as u64, "{sent}");
        assert_eq!(compare_files(&b""[..], &b""[..]).unwrap(), []);
    }
}
