//! Entries appear whole, are verified, and are built again where they are damaged. No compiler is needed: contents are made up.

use std::collections::BTreeSet;
use std::sync::Barrier;
use std::time::Duration;

use super::super::arch::Arch;
use super::super::nvrtc::{Compiled, CompilerId};
use super::super::request::{Define, KernelRequest};
use super::super::source::{Header, KernelSource};
use super::super::usage::Usage;
use super::*;
use crate::config::CacheLayout;

const HEADER: Header = Header { name: "h.cuh", text: "// a header\n" };
const SOURCE: KernelSource = KernelSource { name: "k", main: "#include \"h.cuh\"\nint x;\n", headers: &[HEADER] };

fn artefact(beta: f32, compiler: &str, byte: u8) -> Artefact {
    let request = KernelRequest::new(SOURCE, Arch::Sm90a).with("BETA", Define::float(beta));
    let parts = KeyParts::new(&request, &CompilerId::from_text(compiler));
    let usage =
        Usage { kernel: "k".into(), num_registers: 8, stack_bytes: 0, spill_store_bytes: 0, spill_load_bytes: 0 };
    let compiled =
        Compiled { cubin: vec![byte; 5000], usage: vec![usage], log: String::new(), elapsed: Duration::ZERO };
    Artefact::new(&request, parts, compiled)
}

fn one() -> Artefact {
    artefact(4.0, "13.0.88 (a)", 7)
}

fn place(local_rank: usize) -> Place {
    Place::Rank { host: "node".to_owned(), local_rank, layout: CacheLayout::PerRank }
}

fn flat() -> Place {
    Place::Rank { host: "node".to_owned(), local_rank: 0, layout: CacheLayout::Flat }
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(dir)
        .map(|entries| {
            entries.map(|entry| entry.expect("an entry").file_name().to_string_lossy().into_owned()).collect()
        })
        .unwrap_or_default();
    names.sort();
    names
}

#[test]
fn an_entry_has_its_place_its_files_and_nothing_of_who_made_it() {
    let root = tempfile::tempdir().expect("a directory");
    let made = one();
    for rank in [0, 1] {
        let mut cache = Cache::open(Some(root.path()), &place(rank));
        assert_eq!(cache.find("k", made.key()), None);
        cache.publish(&made);
        assert_eq!(cache.find("k", made.key()).as_ref(), Some(&made));
        assert_eq!(cache.take_notes(), Vec::<String>::new());
    }
    let entry = |rank: usize| root.path().join(format!("node/rank{rank}/kernel.k.{}", made.key()));
    assert_eq!(names(&entry(0)), ["kernel.cu", "kernel.cubin", "manifest.json"]);
    for file in names(&entry(0)) {
        let [a, b] = [0, 1].map(|rank| fs::read(entry(rank).join(&file)).expect("a file"));
        assert_eq!(a, b, "{file} of both ranks");
    }
    assert_eq!(names(entry(0).parent().expect("a parent")).len(), 1, "nothing is left beside it");
    let source = fs::read_to_string(entry(0).join("kernel.cu")).expect("a source");
    assert!(source.contains("#define BETA 0x40800000u") && source.contains("// a header\n"), "{source}");
    assert!(!source.contains("#include"), "it compiles by itself: {source}");
}

#[test]
fn two_pairs_of_situ_constants_live_side_by_side() {
    let root = tempfile::tempdir().expect("a directory");
    let mut cache = Cache::open(Some(root.path()), &place(0));
    let (four, five) = (artefact(4.0, "c", 4), artefact(5.0, "c", 5));
    cache.publish(&four);
    assert_eq!(cache.changes(five.parts()), ["define BETA 0x40800000u -> 0x40a00000u"]);
    assert_eq!(cache.find("k", five.key()), None, "never the old one");
    cache.publish(&five);
    assert_eq!(cache.find("k", four.key()).map(|found| found.cubin()[0]), Some(4));
    assert_eq!(cache.find("k", five.key()).map(|found| found.cubin()[0]), Some(5));
}

#[test]
fn the_shared_layer_is_read_and_never_written() {
    let root = tempfile::tempdir().expect("a directory");
    let made = one();
    let shared = Place::Shared { host: "build".to_owned() };
    Cache::open(Some(root.path()), &shared).publish(&made);
    let mut cache = Cache::open(Some(root.path()), &place(0));
    assert_eq!(cache.find("k", made.key()), Some(made.clone()));
    assert_eq!(names(root.path()), ["shared"]);
    let cubin = root.path().join(format!("shared/kernel.k.{}/kernel.cubin", made.key()));
    fs::write(&cubin, "x").expect("written");
    assert_eq!(cache.find("k", made.key()), None);
    let notes = cache.take_notes();
    assert!(notes.len() == 1 && notes[0].contains("is not used") && notes[0].contains("lockstep warmup"), "{notes:?}");
    assert!(cubin.exists(), "it is somebody else's");
}

#[test]
fn every_damage_is_found_set_aside_and_said_once() {
    let made = one();
    let entry = format!("kernel.k.{}", made.key());
    type Damage = fn(&Path);
    let cases: [(&str, Damage); 9] = [
        ("kernel.cubin has 4999 bytes, 5000 were written", |dir| {
            fs::write(dir.join("kernel.cubin"), vec![7; 4999]).expect("written");
        }),
        ("kernel.cubin is not what was written", |dir| {
            let mut cubin = fs::read(dir.join("kernel.cubin")).expect("read");
            cubin[2500] ^= 1;
            fs::write(dir.join("kernel.cubin"), cubin).expect("written");
        }),
        ("kernel.cubin has 0 bytes", |dir| fs::write(dir.join("kernel.cubin"), "").expect("written")),
        ("kernel.cu is not what", |dir| {
            let text = fs::read_to_string(dir.join("kernel.cu")).expect("read");
            fs::write(dir.join("kernel.cu"), text.replace("int x", "int y")).expect("written");
        }),
        ("kernel.cubin: No such file", |dir| fs::remove_file(dir.join("kernel.cubin")).expect("removed")),
        ("manifest.json: No such file", |dir| fs::remove_file(dir.join("manifest.json")).expect("removed")),
        ("manifest.json is not of this version's form", |dir| {
            fs::write(dir.join("manifest.json"), "{\"version\": 1").expect("written");
        }),
        ("manifest.json is not of this version's form", |dir| {
            let text = fs::read_to_string(dir.join("manifest.json")).expect("read");
            fs::write(dir.join("manifest.json"), text.replacen("\"version\": 1", "\"version\": 2", 1))
                .expect("written");
        }),
        ("manifest.json is of the key", |dir| {
            let text = fs::read_to_string(dir.join("manifest.json")).expect("read");
            fs::write(dir.join("manifest.json"), text.replace("0x40800000u", "0x40a00000u")).expect("written");
        }),
    ];
    for (words, damage) in cases {
        let root = tempfile::tempdir().expect("a directory");
        let mut cache = Cache::open(Some(root.path()), &flat());
        cache.publish(&made);
        damage(&root.path().join(&entry));
        assert_eq!(cache.find("k", made.key()), None, "{words}");
        let notes = cache.take_notes();
        assert!(notes.len() == 1 && notes[0].contains(words), "{words}: {notes:?}");
        assert!(names(root.path())[0].starts_with("damaged.node."), "{words}: {:?}", names(root.path()));
        cache.publish(&made);
        assert_eq!(cache.find("k", made.key()).as_ref(), Some(&made), "{words}");
        assert_eq!(cache.take_notes(), Vec::<String>::new(), "{words}");
    }
}

#[test]
fn a_name_may_not_be_borrowed() {
    let root = tempfile::tempdir().expect("a directory");
    let mut cache = Cache::open(Some(root.path()), &flat());
    let (four, five) = (artefact(4.0, "c", 4), artefact(5.0, "c", 5));
    cache.publish(&four);
    fs::rename(root.path().join(paths::entry("k", four.key())), root.path().join(paths::entry("k", five.key())))
        .expect("renamed");
    assert_eq!(cache.find("k", five.key()), None, "another kernel's code, however sound");
    assert!(cache.take_notes()[0].contains("is of the key"));
}

#[test]
fn of_eight_that_race_all_end_with_a_whole_entry() {
    for _ in 0..20 {
        let root = tempfile::tempdir().expect("a directory");
        let start = Barrier::new(8);
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let mut cache = Cache::open(Some(root.path()), &flat());
                    start.wait();
                    cache.publish(&one());
                    assert_eq!(cache.find("k", one().key()), Some(one()));
                    assert_eq!(cache.take_notes(), Vec::<String>::new());
                });
            }
        });
        assert_eq!(names(root.path()), [paths::entry("k", one().key())], "one entry, no leftovers");
    }
}

/// Case F5 (i), (ii), (v): nowhere to write. Permissions do not bind root, so that the places are such that nobody can write.
#[test]
fn case_f5_nowhere_to_write_costs_one_note() {
    let root = tempfile::tempdir().expect("a directory");
    let file = root.path().join("file");
    fs::write(&file, "x").expect("written");
    for (dir, word) in [(Some(Path::new("/proc")), "/proc"), (Some(file.as_path()), "file"), (None, "HOME")] {
        let mut cache = Cache::open(dir, &place(0));
        assert_eq!(cache.find("k", one().key()), None);
        cache.publish(&one());
        cache.publish(&artefact(5.0, "c", 5));
        let notes = cache.take_notes();
        assert_eq!(notes.len(), 1, "{notes:?}");
        assert!(notes[0].contains(word) && notes[0].contains("LOCKSTEP_CACHE_DIR"), "{notes:?}");
        let private = cache.private.as_ref().expect("a private directory").path().to_owned();
        assert_eq!(names(&private).len(), 2);
        drop(cache);
        assert!(!private.exists(), "it goes with its run");
    }
    assert_eq!(fs::read(&file).expect("untouched"), b"x");
}

#[test]
fn what_killed_writers_left_is_removed_and_living_ones_are_left_alone() {
    let root = tempfile::tempdir().expect("a directory");
    // No process has the largest number that the kernel could give.
    let dead = root.path().join("tmp.node.4194999.abc");
    let alive = root.path().join(format!("tmp.node.{}.abc", std::process::id()));
    let elsewhere = root.path().join("tmp.other.4194999.abc");
    for dir in [&dead, &alive, &elsewhere] {
        fs::create_dir(dir).expect("made");
        fs::write(dir.join("kernel.cubin"), "half").expect("written");
    }
    let _ = Cache::open(Some(root.path()), &flat());
    assert_eq!([dead.exists(), alive.exists(), elsewhere.exists()], [false, true, true]);
    let pruned = prune(root.path(), |listed| listed.is_leftover).expect("pruned");
    assert_eq!((pruned, names(root.path()).len()), (Pruned { num_removed: 2, num_bytes: 8 }, 0));
}

#[test]
fn a_message_holds_artefacts_to_the_last_byte() {
    let (a, b) = (artefact(4.0, "c", 4), artefact(5.0, "c", 5));
    let bytes = [a.encode(), b.encode()].concat();
    let mut rest = bytes.as_slice();
    assert_eq!(Artefact::decode(&mut rest, a.key()).expect("the first"), a);
    assert_eq!(Artefact::decode(&mut rest, b.key()).expect("the second"), b);
    assert!(rest.is_empty());
    assert!(Artefact::decode(&mut bytes.as_slice(), b.key()).is_err(), "another one's key");
    assert!(Artefact::decode(&mut &bytes[..100], a.key()).is_err(), "cut off");
    let mut flipped = a.encode();
    let middle = flipped.len() / 2;
    flipped[middle] ^= 0x10;
    assert!(Artefact::decode(&mut flipped.as_slice(), a.key()).is_err(), "flipped");
}

#[test]
fn a_listing_shows_every_layer_and_judges_each_entry() {
    let root = tempfile::tempdir().expect("a directory");
    assert!(list(&root.path().join("none")).expect("an empty list").is_empty());
    let (four, five) = (artefact(4.0, "c", 4), artefact(5.0, "d", 5));
    Cache::open(Some(root.path()), &place(0)).publish(&four);
    Cache::open(Some(root.path()), &place(1)).publish(&five);
    Cache::open(Some(root.path()), &Place::Shared { host: "x".to_owned() }).publish(&five);
    let damaged = root.path().join(format!("shared/kernel.k.{}/kernel.cubin", five.key()));
    fs::write(damaged, "x").expect("written");
    let listed = list(root.path()).expect("a list");
    let states: Vec<bool> = listed.iter().map(|listed| listed.artefact.is_ok()).collect();
    assert_eq!(states, [true, true, false]);
    let compilers: BTreeSet<String> =
        Cache::open(Some(root.path()), &place(1)).compilers(five.parts()).into_iter().collect();
    assert_eq!(compilers, BTreeSet::from(["d".to_owned()]));
    let pruned = prune(root.path(), |listed| listed.artefact.is_err()).expect("pruned");
    assert_eq!((pruned.num_removed, list(root.path()).expect("a list").len()), (1, 2));
}

/// Below `/tmp` anybody may have made the directory first, and what lies there would run on this user's GPU.
#[test]
fn another_user_s_directory_is_not_used() {
    let root = tempfile::tempdir().expect("a directory");
    let made = one();
    Cache::open(Some(root.path()), &place(0)).publish(&made);
    let found = || Cache::open(Some(root.path()), &place(0)).find("k", made.key()).is_some();
    assert!(found(), "one's own");
    if std::os::unix::fs::chown(root.path(), Some(54321), None).is_err() {
        // Only root can give a directory away; /proc/1 is root's then, which is trusted.
        assert!(!is_anothers(Path::new("/proc/1")));
        return;
    }
    assert!(!found(), "another's");
    let mut cache = Cache::open(Some(root.path()), &place(0));
    let notes = cache.take_notes();
    assert!(notes.len() == 1 && notes[0].contains("belongs to another user"), "{notes:?}");
    cache.publish(&made);
    assert_eq!(cache.take_notes(), Vec::<String>::new(), "it is kept in a private directory");
}
