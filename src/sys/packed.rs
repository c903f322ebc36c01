//! Maps of many files.
//!
//! The nodes of a `BTreeMap` are half empty if its keys were inserted in ascending order, as the files
//! of a log are. The maps of a session with a hundred thousand files are most of the memory of the
//! process, so they are packed while they grow.

use std::collections::BTreeMap;

/// After this number of insertions, a map is packed: packing moves every value of the map.
pub const PACK_INTERVAL: usize = 4096;

/// Rebuilds a map with full nodes.
pub fn pack<K: Ord, V>(map: &mut BTreeMap<K, V>) {
    // Appending a map rebuilds all nodes, and frees the old ones on the way.
    if let Some(last) = map.pop_last() {
        map.append(&mut BTreeMap::from([last]));
    }
}

/// Inserts a value, and packs the map from time to time.
pub fn insert_packed<K: Ord, V>(map: &mut BTreeMap<K, V>, key: K, value: V) {
    map.insert(key, value);
    if map.len().is_multiple_of(PACK_INTERVAL) {
        pack(map);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_packed_map_has_the_same_content() {
        let mut packed = BTreeMap::new();
        for key in 0..3 * PACK_INTERVAL {
            insert_packed(&mut packed, key, key * 2);
        }
        assert!(
            packed
                .into_iter()
                .eq((0..3 * PACK_INTERVAL).map(|key| (key, key * 2)))
        );
        let mut empty: BTreeMap<u8, u8> = BTreeMap::new();
        pack(&mut empty);
        assert!(empty.is_empty());
    }
}
