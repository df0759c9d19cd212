//! A data source -> streams of tokens for training and held out, and a fingerprint.

use super::cache::{self, SHARED_BYTES_MIN, Tokenized};
use super::content::{Content, Ids, Wish, in_parallel};
use super::divide::{divide, is_held_out};
use super::documents::{Format, Position, Reader};
use super::doubts::is_text;
use super::files::{self, DataFile};
use super::fingerprint::print_file;
use super::handles::Handles;
use super::index;
use super::listing::Listing;
use super::megatron::{self, Index};
use super::pairs::{At, bin_name, checked, is_beside_its_index, megatron_bin};
use super::overlap::Documents;
use super::store::{Store, Width};
use super::stream::Stream;
use super::tokenize::{self, Recipe};
use super::tokenizer::Encoder;
use super::{DataError, header};
use crate::disk::Disk;
use moejob_protocol::config::{DataConfig, DataSource, TokenType};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A source, divided.
#[derive(Clone, Debug)]
pub(crate) struct Opened {
    pub training: Part,
    pub held_out: Part,
    /// BLAKE3 over names, sizes and contents.
    pub fingerprint: blake3::Hash,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Part {
    pub stream: Stream,
    /// The files that have tokens in it.
    pub origins: Vec<Origin>,
    /// Where they were tokenised here.
    pub documents: Option<Documents>,
    /// Files that are read as text, and what they look like instead.
    pub doubts: Vec<(String, &'static str)>,
    /// They hold tokens, and nothing tells where a document ends within a file.
    pub is_flat: bool,
}

/// A file that data come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Origin {
    /// Relative to the source's root.
    pub name: Vec<u8>,
    /// BLAKE3.
    pub content: [u8; 32],
}

/// What is asked of every source alike.
pub(crate) struct Opening<'a> {
    pub data: &'a DataConfig,
    pub encoder: &'a Encoder,
    pub vocabulary: u32,
    /// Share that is held out.
    pub fraction: f64,
    /// Tokens of a window.
    pub needed: u64,
    /// Number of the source; see [`Listing`].
    pub part: usize,
    pub access: &'a Access,
}

/// How files are got at: what stays open, the node's index, and the disk that reads them.
#[derive(Debug)]
pub(crate) struct Access {
    pub handles: Handles,
    /// Of this user alone, shared by the workers of the node.
    pub folder: Option<PathBuf>,
    pub disk: Disk,
    /// What the files were, of a job that goes on.
    pub known: Option<Listing>,
}

impl Access {
    /// What files hold; in their order.
    pub fn contents(&self, wishes: &[Wish]) -> Result<Vec<(Content, bool)>, DataError> {
        index::contents(wishes, self.folder.as_deref(), self.disk.progress())
    }
}

impl Opening<'_> {
    /// # Errors
    /// See [`DataError`]; it names the file and where in it.
    pub fn open(&self, source: &DataSource) -> Result<Opened, DataError> {
        let find = |root: &String, paths: &Vec<String>, exclude: &Vec<String>| {
            let disk = &self.access.disk;
            files::find(disk, Path::new(root), paths, exclude, &self.data.exclude)
        };
        match source {
            DataSource::Text { root, paths, exclude } => {
                let files = find(root, paths, exclude)?;
                let doubts = in_parallel(&files, is_text)?.into_iter().flatten().collect();
                let by_bytes = matches!(self.encoder, Encoder::Bytes);
                let mut opened = match by_bytes && self.data.end_of_document.is_none() {
                    true => self.bytes(files),
                    false => self.documents(files, Format::Text),
                }?;
                opened.training.doubts = doubts;
                Ok(opened)
            }
            DataSource::Jsonl { root, paths, exclude, field } => {
                self.documents(find(root, paths, exclude)?, Format::Jsonl(field.clone()))
            }
            DataSource::Parquet { root, paths, exclude, field } => {
                self.documents(find(root, paths, exclude)?, Format::Parquet(field.clone()))
            }
            DataSource::Tokens { root, paths, exclude, dtype } => {
                self.tokens(find(root, paths, exclude)?, *dtype)
            }
            DataSource::Megatron { root, paths, exclude } => {
                self.megatron(find(root, paths, exclude)?)
            }
            DataSource::Mixture { parts } => {
                // The manifest's types let no mixture be a part of another.
                let first = parts.first().map(|part| self.open(&part.source));
                first.unwrap_or_else(|| {
                    let root = Path::new("").to_path_buf();
                    Err(DataError::NothingMatches { root, globs: "no parts".to_string() })
                })
            }
        }
    }

    /// Files that lie elsewhere than before get the names that they had, and with them their place.
    /// What they hold is known.
    fn keep_names<T>(
        &self,
        files: &mut [T],
        origin: impl Fn(&T) -> Origin,
        rename: impl Fn(&mut T, Vec<u8>),
    ) {
        let Some(known) = &self.access.known else { return };
        let origins: Vec<Origin> = files.iter().map(&origin).collect();
        for (file, name) in files.iter_mut().zip(known.names(self.part, &origins)) {
            if let Some(name) = name {
                rename(file, name);
            }
        }
        files.sort_by_cached_key(|file| origin(file).name);
    }

    fn stream(&self) -> Stream {
        let DataConfig { reset_at_boundaries, mask_at_boundaries, .. } = *self.data;
        Stream::new(reset_at_boundaries, mask_at_boundaries).on(&self.access.disk)
    }

    /// Text whose bytes are its tokens, read where it lies.
    fn bytes(&self, files: Vec<DataFile>) -> Result<Opened, DataError> {
        let handles = &self.access.handles;
        let store = |file: DataFile| (file.clone(), Store::named(file, handles, Width::U8, 0));
        // No byte is above 255, and the vocabulary has been held to that.
        self.stores(files.into_iter().map(store).collect(), None)
    }

    fn tokens(
        &self,
        files: Vec<DataFile>,
        dtype: Option<TokenType>,
    ) -> Result<Opened, DataError> {
        let handles = &self.access.handles;
        let stores = in_parallel(&files, |file| token_store(file, handles, dtype))?;
        let stores = files.into_iter().zip(stores).collect();
        let mut opened = self.stores(stores, Some(self.vocabulary))?;
        for part in [&mut opened.training, &mut opened.held_out] {
            part.stream.ends_with(self.data.end_of_document);
            part.is_flat = self.data.end_of_document.is_none();
        }
        Ok(opened)
    }

    /// Stores of whole files: some of the files are held out, or the end of the only one.
    /// `vocabulary` is what their ids are held to.
    fn stores(
        &self,
        mut stores: Vec<(DataFile, Store)>,
        vocabulary: Option<u32>,
    ) -> Result<Opened, DataError> {
        let mut wishes = Vec::new();
        for (file, store) in &stores {
            let Store { width, offset, .. } = *store;
            let ids = vocabulary.map(|vocabulary| Ids { width, offset, vocabulary });
            wishes.push(Wish { file, bytes: file.bytes, ids });
        }
        let contents = self.access.contents(&wishes)?;
        for ((file, store), (content, _)) in stores.iter_mut().zip(contents) {
            file.hash = content.hash;
            store.is_of(content.hash);
        }
        self.keep_names(&mut stores, |(file, _)| Origin::of(file), |(file, _), name| {
            file.name = name;
        });
        let mut hasher = blake3::Hasher::new();
        stores.iter().for_each(|(file, _)| print_file(&mut hasher, file, &file.hash));
        let sizes: Vec<(&[u8], u64)> =
            stores.iter().map(|(file, store)| (&file.name[..], store.tokens)).collect();
        let held = divide(&sizes, self.fraction, self.needed);
        let part = || Part { stream: self.stream(), ..Part::default() };
        let mut opened =
            Opened { training: part(), held_out: part(), fingerprint: hasher.finalize() };
        let tail = match &stores[..] {
            [(_, store)] => self.tail(store.tokens),
            _ => 0,
        };
        if tail > 0 && vocabulary.is_none() {
            opened.fingerprint = without_its_end(&opened.fingerprint);
        }
        for ((file, store), held) in stores.into_iter().zip(held) {
            let part = if held { &mut opened.held_out } else { &mut opened.training };
            part.origins.push(Origin::of(&file));
            if tail > 0 {
                let tokens = store.tokens;
                let held_out = opened.held_out.stream.add(store.clone());
                opened.held_out.stream.push(held_out, tokens - tail, tail)?;
                opened.held_out.origins.push(Origin::of(&file));
                let training = opened.training.stream.add(store);
                opened.training.stream.push(training, 0, tokens - tail)?;
            } else {
                part.stream.push_store(store)?;
            }
        }
        Ok(opened)
    }

    /// Tokens at the end of an only file that are held out.
    fn tail(&self, tokens: u64) -> u64 {
        if self.fraction <= 0.0 {
            return 0;
        }
        let share = (tokens as f64 * self.fraction) as u64;
        let tail = share.max(self.needed);
        if tail <= tokens / 2 { tail } else { 0 }
    }

    fn megatron(&self, files: Vec<DataFile>) -> Result<Opened, DataError> {
        let mut pairs = Vec::new();
        for index in &files {
            match megatron_bin(index)? {
                Some(bin) => pairs.push((index.clone(), bin)),
                None => is_beside_its_index(index, &files)?,
            }
        }
        let wishes: Vec<Wish> = pairs.iter().map(|(index, _)| Wish::whole(index)).collect();
        let indices = self.access.contents(&wishes)?;
        let heads = in_parallel(&pairs, |(index, bin)| checked(index, bin))?;
        let ids = |head: &Index| Ids { width: head.width, offset: 0, vocabulary: self.vocabulary };
        let wishes: Vec<Wish> = (pairs.iter().zip(&heads))
            .map(|((_, bin), head)| Wish { file: bin, bytes: bin.bytes, ids: Some(ids(head)) })
            .collect();
        let bins = self.access.contents(&wishes)?;
        let found = pairs.into_iter().zip(heads).zip(indices.into_iter().zip(bins));
        let mut pairs: Vec<(DataFile, DataFile, Index, Store)> = found
            .map(|(((mut index, mut bin), head), ((of_index, _), (of_bin, _)))| {
                (index.hash, bin.hash) = (of_index.hash, of_bin.hash);
                let store = Store::named(bin.clone(), &self.access.handles, head.width, 0);
                (index, bin, head, store)
            })
            .collect();
        let origin = |(index, bin, ..): &(DataFile, DataFile, Index, Store)| Origin {
            name: index.name.clone(),
            content: bin.hash,
        };
        self.keep_names(&mut pairs, origin, |(index, bin, ..), name| {
            index.name = name;
            bin.name = bin_name(&index.name);
        });
        let mut hasher = blake3::Hasher::new();
        for (index, bin, ..) in &pairs {
            print_file(&mut hasher, index, &index.hash);
            print_file(&mut hasher, bin, &bin.hash);
        }
        self.growing(|fraction| {
            let mut parts = [self.stream(), self.stream()];
            let mut origins = [Vec::new(), Vec::new()];
            for pair in &pairs {
                let (index, _, head, store) = pair;
                let stores = [parts[0].add(store.clone()), parts[1].add(store.clone())];
                let before = [parts[0].documents(), parts[1].documents()];
                let (mut at, mut number) = (0, 0);
                let handle = index.open()?;
                let see = &mut |tokens| -> Result<(), Stop> {
                    let part = usize::from(is_held_out(&index.name, number, fraction));
                    parts[part].push(stores[part], at, tokens)?;
                    (at, number) = (at + tokens, number + 1);
                    Ok(())
                };
                let mut at_index = At::new(&handle);
                head.each_document(&mut at_index, store.tokens * head.width.bytes(), see)
                    .map_err(|stop| stop.at(index, at_index))?;
                index.clone().check(&handle)?;
                for part in 0..2 {
                    if parts[part].documents() > before[part] {
                        origins[part].push(origin(pair));
                    }
                }
            }
            Ok((parts, origins, hasher.finalize()))
        })
    }

    /// Documents that are tokenised into a file of ours.
    fn documents(&self, mut files: Vec<DataFile>, format: Format) -> Result<Opened, DataError> {
        let wishes: Vec<Wish> = files.iter().map(Wish::whole).collect();
        let contents = self.access.contents(&wishes)?;
        for (file, (content, _)) in files.iter_mut().zip(contents) {
            file.hash = content.hash;
        }
        self.keep_names(&mut files, Origin::of, |file, name| file.name = name);
        let mut hasher = blake3::Hasher::new();
        files.iter().for_each(|file| print_file(&mut hasher, file, &file.hash));
        let print = hasher.finalize();
        let sizes: Vec<(&[u8], u64)> =
            files.iter().map(|file| (&file.name[..], file.bytes)).collect();
        let held_files = divide(&sizes, self.fraction, self.needed);
        let files = Arc::new(files);
        let (field, whole_files) = match &format {
            Format::Text => (String::new(), true),
            Format::Jsonl(field) | Format::Parquet(field) => (field.clone(), false),
        };
        let end_of_document = self.data.end_of_document;
        let recipe = Recipe { encoder: self.encoder.clone(), field, end_of_document };
        let made = self.tokenized(&files, &format, &recipe, &print)?;
        let only = whole_files && files.len() == 1;
        let tail = if only { self.tail(made.store.tokens) } else { 0 };
        let mut fraction_used = self.fraction;
        let mut opened = self.growing(|fraction| {
            fraction_used = fraction;
            let mut parts = [self.stream(), self.stream()];
            let stores = [parts[0].add(made.store.clone()), parts[1].add(made.store.clone())];
            let mut origins = [Vec::new(), Vec::new()];
            if tail > 0 {
                let (whole, origin) = (made.store.tokens, vec![Origin::of(&files[0])]);
                parts[0].push(stores[0], 0, whole - tail)?;
                parts[1].push(stores[1], whole - tail, tail)?;
                return Ok((parts, [origin.clone(), origin], without_its_end(&print)));
            }
            let mut at = 0;
            made.each(&mut |document| {
                let index = document.file as usize;
                let file = &files[index];
                let held = match whole_files {
                    true => held_files[index],
                    false => is_held_out(&file.name, document.number, fraction),
                };
                let part = usize::from(held);
                let last: Option<&Origin> = origins[part].last();
                if last.is_none_or(|last| last.name != file.name) {
                    origins[part].push(Origin::of(file));
                }
                parts[part].push(stores[part], at, document.tokens)?;
                at += document.tokens;
                Ok(())
            })?;
            Ok((parts, origins, print))
        })?;
        let documents = |held_out| {
            let held_files = whole_files.then(|| held_files.clone());
            let (made, files, fraction) = (made.clone(), files.clone(), fraction_used);
            Some(Documents { made, files, held_files, fraction, held_out })
        };
        opened.training.documents = documents(false);
        opened.held_out.documents = documents(true);
        Ok(opened)
    }

    /// The tokens of all documents, made by this process or by another one of this node.
    fn tokenized(
        &self,
        files: &Arc<Vec<DataFile>>,
        format: &Format,
        recipe: &Recipe,
        print: &blake3::Hash,
    ) -> Result<Tokenized, DataError> {
        let width = Width::of(self.vocabulary);
        let bytes: u64 = files.iter().map(|file| file.bytes).sum();
        let folder = self.access.folder.as_deref().filter(|_| bytes >= SHARED_BYTES_MIN);
        let mut key = blake3::Hasher::new();
        key.update(b"moejob tokens 3");
        key.update(print.as_bytes());
        key.update(&recipe.encoder.fingerprint());
        key.update(format!("{format:?} {:?} {width:?}", recipe.end_of_document).as_bytes());
        let (disk, progress) = (&self.access.disk, self.access.disk.progress());
        cache::tokenized(folder, &key.finalize(), width, disk, &mut |making| {
            let cutter = recipe.encoder.cutter();
            let reader = Reader::new(files.clone(), format.clone(), Position::default(), cutter);
            let mut raw = 0;
            progress.expect(bytes);
            tokenize::tokenize(reader, files, recipe, tokenize::threads(), &mut |tokens| {
                if progress.is_given_up() {
                    return Err(DataError::GivenUp);
                }
                let mut ids = &tokens.ids[..];
                for document in &tokens.documents {
                    let (own, others) = ids.split_at(document.tokens as usize);
                    making.ids(own)?;
                    ids = others;
                    if document.ends {
                        making.document(tokens.file as u64, document.number)?;
                    }
                }
                progress.know(tokens.raw.min(bytes).saturating_sub(raw));
                raw = raw.max(tokens.raw.min(bytes));
                Ok(())
            })?;
            progress.know(bytes - raw);
            Ok(())
        })
    }

    /// Divides documents by the hash of their place. Of few documents the share may have no whole
    /// window: then twice the share is tried.
    fn growing(
        &self,
        mut divide: impl FnMut(f64) -> Result<Divided, DataError>,
    ) -> Result<Opened, DataError> {
        let mut fraction = self.fraction;
        loop {
            let ([training, held_out], [origins, held_origins], fingerprint) = divide(fraction)?;
            let enough = held_out.tokens() >= self.needed;
            if fraction <= 0.0 || enough || fraction >= 0.25 {
                return Ok(Opened {
                    training: Part { stream: training, origins, ..Part::default() },
                    held_out: Part {
                        stream: held_out,
                        origins: held_origins,
                        ..Part::default()
                    },
                    fingerprint,
                });
            }
            fraction = (fraction * 2.0).clamp(1.0 / 64.0, 0.25);
        }
    }
}

/// Of an only file of text whose end is held out. Releases before trained on all of it, and their
/// checkpoints are none of such a job's.
fn without_its_end(print: &blake3::Hash) -> blake3::Hash {
    blake3::hash(&[print.as_bytes(), &b"its end is held out"[..]].concat())
}

type Divided = ([Stream; 2], [Vec<Origin>; 2], blake3::Hash);

impl Origin {
    fn of(file: &DataFile) -> Origin {
        Origin { name: file.name.clone(), content: file.hash }
    }
}

/// Why the walk over an index ended.
enum Stop {
    Refused(megatron::Refused),
    Data(DataError),
}

impl Stop {
    fn at(self, index: &DataFile, at: At) -> DataError {
        match self {
            Stop::Refused(refused) => at.refused(index, refused),
            Stop::Data(error) => error,
        }
    }
}

impl From<megatron::Refused> for Stop {
    fn from(refused: megatron::Refused) -> Stop {
        Stop::Refused(refused)
    }
}

impl From<DataError> for Stop {
    fn from(error: DataError) -> Stop {
        Stop::Data(error)
    }
}

/// The tokens of a file with llm.c's header, or of a flat one of `dtype`.
pub(crate) fn token_store(
    file: &DataFile,
    handles: &Handles,
    dtype: Option<TokenType>,
) -> Result<Store, DataError> {
    let head = file.head(header::HEAD_BYTES)?;
    let bad = |(at, why): (String, String)| DataError::bad(&file.path, at, why);
    header::not_foreign(&head, true).map_err(bad)?;
    let kind = header::kind(&head, file.bytes, dtype).map_err(bad)?;
    Ok(Store::named(file.clone(), handles, kind.width, kind.offset))
}
