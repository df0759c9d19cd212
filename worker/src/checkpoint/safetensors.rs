//! The header of a safetensors file, believed only after every check: 8 bytes of length, JSON, then
//! tensors that fill the rest without gap.

use serde::de::{Deserializer, Error, MapAccess, Visitor};
use crate::disk::OpenFile;
use moejob_protocol::checkpoint::{HEADER_BYTES_MAX, TENSORS_MAX};
use serde::Deserialize;
use std::collections::{BTreeMap, BTreeSet};
use std::io;

/// The longest name of a tensor.
const NAME_BYTES_MAX: usize = 512;

/// Where the tensors of a file lie.
#[derive(Clone, Debug, Default)]
pub struct Header {
    /// Ascending by their place in the file.
    pub tensors: Vec<Tensor>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    pub name: String,
    pub dtype: String,
    pub shape: Vec<u64>,
    /// Bytes of the file.
    pub begin: u64,
    pub end: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// Entries as they stand, a name that comes twice included.
struct Entries(Vec<(String, Entry)>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Entries, D::Error> {
        struct All;
        impl<'de> Visitor<'de> for All {
            type Value = Entries;

            fn expecting(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut entries = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<BTreeMap<String, String>>()?;
                        continue;
                    }
                    if entries.len() as u64 == TENSORS_MAX {
                        return Err(A::Error::custom(format!("more than {TENSORS_MAX} tensors")));
                    }
                    entries.push((name, map.next_value()?));
                }
                Ok(Entries(entries))
            }
        }
        deserializer.deserialize_map(All)
    }
}

/// Reads the header of a file of `bytes` bytes.
///
/// # Errors
/// What is wrong with it, and where (`InvalidData`); or what storage answers.
pub fn read_header(file: &OpenFile, bytes: u64) -> io::Result<Header> {
    let broken = |why: String| {
        let why = format!("its safetensors header is broken: {why}");
        io::Error::new(io::ErrorKind::InvalidData, why)
    };
    let mut prefix = [0; 8];
    if bytes < 8 {
        return Err(broken("fewer than 8 bytes".to_string()));
    }
    file.read_exact_at(&mut prefix, 0)?;
    let length = u64::from_le_bytes(prefix);
    if length < 2 || length > HEADER_BYTES_MAX || length > bytes - 8 {
        return Err(broken(format!(
            "a length of {length} at byte 0, in a file of {bytes}; at most {HEADER_BYTES_MAX}"
        )));
    }
    let mut text = vec![0; length as usize];
    file.read_exact_at(&mut text, 8)?;
    parse(&text, bytes).map_err(broken)
}

/// The header of a file of `bytes` bytes.
fn parse(text: &[u8], bytes: u64) -> Result<Header, String> {
    if !text.starts_with(b"{") {
        return Err(format!("byte 8 is 0x{:02x}, not `{{`: no JSON object", text[0]));
    }
    let entries: Entries = serde_json::from_slice(text).map_err(|error| error.to_string())?;
    tensors(entries.0, 8 + text.len() as u64, bytes)
}

fn tensors(entries: Vec<(String, Entry)>, data: u64, bytes: u64) -> Result<Header, String> {
    let mut names = BTreeSet::new();
    let mut tensors = Vec::with_capacity(entries.len());
    for (name, entry) in entries {
        let hidden = name.chars().any(char::is_control) || name.split('/').any(|part| part == "..");
        if name.is_empty() || name.len() > NAME_BYTES_MAX || hidden {
            return Err(format!("{:?} is no name of a tensor", shortened(&name)));
        }
        if !names.insert(name.clone()) {
            return Err(format!("{name} comes twice"));
        }
        let [begin, end] = entry.data_offsets;
        let Some(width) = width(&entry.dtype) else {
            return Err(format!("{name}: the dtype {:?} is unknown", shortened(&entry.dtype)));
        };
        let size = entry.shape.iter().try_fold(width, |all, dim| all.checked_mul(*dim));
        if end.checked_sub(begin) != size || size.is_none() {
            return Err(format!(
                "{name}: bytes {begin}..{end} are not {:?} of {}",
                entry.shape, entry.dtype
            ));
        }
        let (Some(begin), Some(end)) = (data.checked_add(begin), data.checked_add(end)) else {
            return Err(format!("{name}: bytes {begin}..{end} lie beyond any file"));
        };
        tensors.push(Tensor { name, dtype: entry.dtype, shape: entry.shape, begin, end });
    }
    tensors.sort_by_key(|tensor| (tensor.begin, tensor.end));
    let mut at = data;
    for tensor in &tensors {
        if tensor.begin != at {
            let kind = if tensor.begin > at { "a gap" } else { "an overlap" };
            return Err(format!("{kind} at byte {at}, where {} should begin", tensor.name));
        }
        at = tensor.end;
    }
    match at.cmp(&bytes) {
        std::cmp::Ordering::Equal => Ok(Header { tensors }),
        std::cmp::Ordering::Greater => {
            Err(format!("its tensors end at byte {at}, the file at {bytes}: cut short"))
        }
        std::cmp::Ordering::Less => {
            Err(format!("{} bytes follow the last tensor, at byte {at}", bytes - at))
        }
    }
}

fn shortened(text: &str) -> String {
    text.chars().take(64).collect()
}

/// Bytes of an element of every type that the format names.
fn width(dtype: &str) -> Option<u64> {
    match dtype {
        "BOOL" | "U8" | "I8" | "F8_E5M2" | "F8_E4M3" | "F8_E8M0" => Some(1),
        "I16" | "U16" | "F16" | "BF16" => Some(2),
        "I32" | "U32" | "F32" => Some(4),
        "I64" | "U64" | "F64" | "C64" => Some(8),
        _ => None,
    }
}
