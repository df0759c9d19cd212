#!/bin/sh
# Writes the documents of lesson 7, in place of your own: FOLDER/train.jsonl and FOLDER/test.jsonl.
#
#   sh examples/07-own-data/make.sh FOLDER
#
# A document is a line {"text": "..."} with a few sentences of arithmetic. Whether the model has
# learned them can be seen: the numbers that it goes on with are right or wrong.
set -eu
folder=${1:?usage: make.sh FOLDER}
mkdir -p "$folder"

# write FILE DOCUMENTS SEED
write() {
  awk -v documents="$2" -v seed="$3" '
    # Park and Miller: the same numbers from every awk.
    function below(bound) {
      seed = (seed * 16807) % 2147483647
      return int(seed / 2147483647 * bound)
    }
    function sentence(   all, few) {
      all = 3 + below(18)
      few = 1 + below(all - 1)
      return "A " gang[1 + below(gangs)] " of " all " " one[1 + below(ones)] "s loses " few \
        ". " all - few " are left. "
    }
    BEGIN {
      gangs = split("gang team crew group row ring field house", gang, " ")
      ones = split("worker rank node token router expert shard leader", one, " ")
      for (document = 0; document < documents; document++) {
        text = ""
        for (part = 0; part < 4; part++) text = text sentence()
        print "{\"text\": \"" text "\"}"
      }
    }' > "$1"
}

write "$folder/train.jsonl" 4000 1
write "$folder/test.jsonl" 400 2
echo "$folder/train.jsonl: 4000 documents, $folder/test.jsonl: 400"
