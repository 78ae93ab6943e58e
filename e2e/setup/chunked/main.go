// Measures zstd:chunked, for e2e/setup/bench-deltas.sh: `chunked OLD.tar NEW.tar` prints the bytes that a node with the old layer
// downloads of the new one, and the size of the new layer.
//
// A node needs the chunks that no file of the old layer has, and to rebuild the tar, the table of contents and the tar-split.
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"os"

	"github.com/containers/storage/pkg/chunked/compressor"
	"github.com/klauspost/compress/zstd"
)

const annotation = "io.github.containers.zstd-chunked."

// A file of the table of contents, or a further chunk of it.
type entry struct {
	Type        string `json:"type"`
	Digest      string `json:"digest"`
	Offset      int64  `json:"offset"`
	EndOffset   int64  `json:"endOffset"`
	ChunkDigest string `json:"chunkDigest"`
}

type layer struct {
	bytes int64
	// Compressed bytes of each chunk, by the digest of its content.
	chunks map[string]int64
	// Compressed bytes of the table of contents and the tar-split.
	tables int64
}

// Compresses a layer, and reads its table of contents.
func read(tar string) (*layer, error) {
	file, err := os.Open(tar)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	var blob bytes.Buffer
	annotations := map[string]string{}
	writer, err := compressor.ZstdCompressor(&blob, annotations, nil)
	if err != nil {
		return nil, err
	}
	if _, err := io.Copy(writer, file); err != nil {
		return nil, err
	}
	if err := writer.Close(); err != nil {
		return nil, err
	}

	var toc, length, split int64
	if _, err := fmt.Sscanf(annotations[annotation+"manifest-position"], "%d:%d:", &toc, &length); err != nil {
		return nil, err
	}
	var ignored int64
	if _, err := fmt.Sscanf(annotations[annotation+"tarsplit-position"], "%d:%d:", &ignored, &split); err != nil {
		return nil, err
	}
	decoder, err := zstd.NewReader(bytes.NewReader(blob.Bytes()[toc : toc+length]))
	if err != nil {
		return nil, err
	}
	defer decoder.Close()
	var contents struct {
		Entries []entry `json:"entries"`
	}
	if err := json.NewDecoder(decoder).Decode(&contents); err != nil {
		return nil, err
	}
	found := &layer{bytes: int64(blob.Len()), chunks: map[string]int64{}, tables: length + split}
	end := int64(0) // of the file to which a chunk belongs
	for i, e := range contents.Entries {
		if e.Type != "reg" && e.Type != "chunk" {
			continue
		}
		if e.Type == "reg" {
			end = e.EndOffset
		}
		last, digest := end, e.ChunkDigest
		if digest == "" {
			digest = e.Digest
		}
		if next := i + 1; next < len(contents.Entries) && contents.Entries[next].Type == "chunk" {
			last = contents.Entries[next].Offset
		}
		if digest != "" {
			found.chunks[digest] = last - e.Offset
		}
	}
	return found, nil
}

func main() {
	if len(os.Args) != 3 {
		log.Fatal("usage: chunked OLD.tar NEW.tar")
	}
	before, err := read(os.Args[1])
	if err != nil {
		log.Fatal(err)
	}
	after, err := read(os.Args[2])
	if err != nil {
		log.Fatal(err)
	}
	download := after.tables
	for digest, bytes := range after.chunks {
		if _, has := before.chunks[digest]; !has {
			download += bytes
		}
	}
	fmt.Println(download, after.bytes)
}
